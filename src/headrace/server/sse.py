"""Server-sent events: the bytes of a frame, and the ASGI response that sends them until the end or a disconnect.

A frame's constant parts are encoded once per request, its text by msgspec: no pydantic and no dictionary per token. A
stream ends with its reply's `end` or its `fail`; there is no other way out. Of OpenAI's that is a finish frame per
choice, or one error frame, and then `[DONE]`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import ErrorInfo, RequestError
from headrace.processing.outputs import TextDelta
from headrace.server.disconnect import ClientGone
from headrace.server.errors import error_object, internal_error
from headrace.server.shape import ChoiceParts, Reply, ReplyShape, failure, usage_object
from headrace.types import FinishReason, Usage

if TYPE_CHECKING:
    from headrace.server.generation import Generation

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the frames back
]
FINISH = {None: b"null", FinishReason.STOP: b'"stop"', FinishReason.LENGTH: b'"length"', FinishReason.ABORT: b'"abort"'}


def encode(value: object) -> bytes:
    return msgspec.json.encode(value)


def version_json(parts: ChoiceParts) -> bytes:
    """The member of a choice's last frame that says which weights made it."""
    return b',"weight_version":' + encode(parts.versions.last)


def error_end(info: ErrorInfo) -> bytes:
    """How a stream of OpenAI's ends that has failed."""
    return b"data: " + encode(error_object(info)) + b"\n\n" + DONE


class FrameWriter:
    """Frames of one stream: `data: {id, object, created, model, choices: [one], usage?}`."""

    def __init__(self, shape: ReplyShape, kind: str) -> None:
        head = {"id": shape.id, "object": kind, "created": shape.created, "model": shape.model}
        self._head = b"data: " + encode(head)[:-1]
        self._continuous = shape.continuous_usage
        self._include_usage = shape.include_usage
        self._end = b',"usage":null}\n\n' if shape.include_usage else b"}\n\n"

    def frame(self, choice: bytes, usage: Usage, more: bytes = b"") -> bytes:
        """`more`: further members of the frame, each with a comma before it."""
        if self._continuous:
            more += b',"usage":' + encode(usage_object(usage))
            return b"".join((self._head, b',"choices":[', choice, b"]", more, b"}\n\n"))
        return b"".join((self._head, b',"choices":[', choice, b"]", more, self._end))

    def end(self, usage: Usage) -> bytes:
        """After the last choice: the usage, if it was asked for."""
        if not self._include_usage:
            return DONE
        return b"".join((self._head, b',"choices":[],"usage":', encode(usage_object(usage)), b"}\n\n", DONE))


class EventStream(Response):
    """Sends a generation's frames. Its first outputs have come already: a failure before them had its own status."""

    def __init__(self, generation: Generation, first: list[TextDelta], reply: Reply) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(HEADERS)
        self._generation = generation
        self._first = first
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        try:
            await generation.watch.run(self._send(send))
        except ClientGone:
            pass
        finally:
            generation.end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for frames in self._frames():
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            tail = self._reply.end(self._generation.usage)
        except RequestError as error:
            tail = self._reply.fail(error.info(), self._generation.usage)
        except Exception:
            fields = {"request_id": self._generation.log_id}
            logger.exception("stream failed", extra={"headrace_fields": fields})
            self._generation.note_error("internal_error")
            tail = self._reply.fail(internal_error(), self._generation.usage)
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _frames(self) -> AsyncIterator[bytes]:
        """Raises the error of a choice after the text that came before it."""
        generation, reply = self._generation, self._reply
        deltas: list[TextDelta] | None = self._first
        while deltas is not None:
            for index, delta in enumerate(deltas):
                if error := failure(delta):
                    yield reply.frames(deltas[:index], generation.usage)
                    raise error
            yield reply.frames(deltas, generation.usage)
            deltas = await generation.next()
