"""Server-sent events: the bytes of a frame, and the ASGI response that sends them until the end or a disconnect.

A frame's constant parts are encoded once per request, its text by msgspec: no pydantic and no dictionary per token. A
stream ends with its reply's `end` or its `fail`; there is no other way out. Of OpenAI's that is a finish frame per
choice, or one error frame, and then `[DONE]`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import ErrorInfo, RequestError
from headrace.processing.outputs import TextDelta
from headrace.server.disconnect import ClientGone
from headrace.server.errors import error_object, internal_error
from headrace.server.shape import ChoiceParts, ChoiceVersions, Reply, ReplyShape, failure, usage_object
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


_encode = msgspec.json.Encoder().encode


def encode(value: object) -> bytes:
    return _encode(value)


def version_json(parts: ChoiceParts) -> bytes:
    """The member of a choice's last frame that says which weights made it."""
    return b',"weight_version":' + encode(parts.versions.last)


def error_end(info: ErrorInfo) -> bytes:
    """How a stream of OpenAI's ends that has failed."""
    return b"data: " + encode(error_object(info)) + b"\n\n" + DONE


class TextFrames:
    """Makes the frames of one choice that carry text and nothing else: all but a few of a stream."""

    __slots__ = ("_after", "_before", "_versions")

    def __init__(self, versions: ChoiceVersions, before: bytes, after: bytes) -> None:
        self._versions = versions
        self._before = before
        self._after = after

    def frame(self, delta: TextDelta) -> bytes:
        self._versions.num_tokens += len(delta.token_ids)
        return b"".join((self._before, _encode(delta.text), self._after)) if delta.text else b""


class FrameWriter:
    """Frames of one stream: `data: {id, object, created, model, choices: [one], usage?}`."""

    def __init__(self, shape: ReplyShape, kind: str) -> None:
        head = {"id": shape.id, "object": kind, "created": shape.created, "model": shape.model}
        self._head = b"data: " + encode(head)[:-1]
        self._continuous = shape.continuous_usage
        self._has_more = shape.continuous_usage or shape.return_token_ids or shape.num_top is not None
        self._include_usage = shape.include_usage
        self._end = b',"usage":null}\n\n' if shape.include_usage else b"}\n\n"

    def text_frames(self, versions: ChoiceVersions, before: bytes, after: bytes) -> TextFrames | None:
        """For the frames of a choice that have text alone, between `before` and `after`; None if they have more."""
        if self._has_more:
            return None
        return TextFrames(versions, self._head + b',"choices":[' + before, after + b"]" + self._end)

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
        generation, reply = self._generation, self._reply
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        send = generation.send_body
        try:
            deltas: list[TextDelta] | None = self._first
            while deltas is not None:
                deltas, error = _before_failure(deltas)
                if frames := reply.frames(deltas, generation.usage):
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                if error is not None:
                    raise error
                deltas = await generation.next()
            tail = reply.end(generation.usage)
        except RequestError as error:
            tail = reply.fail(error.info(), generation.usage)
        except Exception:
            fields = {"request_id": generation.log_id}
            logger.exception("stream failed", extra={"headrace_fields": fields})
            generation.note_error("internal_error")
            tail = reply.fail(internal_error(generation.log_id), generation.usage)
        await send({"type": "http.response.body", "body": tail, "more_body": False})


def _before_failure(deltas: list[TextDelta]) -> tuple[list[TextDelta], RequestError | None]:
    """The deltas that come before the first one that failed, and its error."""
    for index, delta in enumerate(deltas):
        if error := failure(delta):
            return deltas[:index], error
    return deltas, None
