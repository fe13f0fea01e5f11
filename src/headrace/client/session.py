"""What both clients have in common: admission, streams, pending calls, the handshake and the end of the engine.

A client owns a way to send and hands every message that arrives to `handle`. Belongs to one event loop; owns no socket,
no thread and no process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from headrace.client.admission import Admission
from headrace.client.streams import ClientStream, StreamTable, num_choices
from headrace.errors import Draining, ErrorInfo, FailedRequest, Unavailable
from headrace.transport.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortDone,
    Control,
    ControlDone,
    EngineDead,
    EngineInfo,
    EngineReady,
    FromEngine,
    Lifecycle,
    StepOutputs,
    Submit,
    ToEngine,
)
from headrace.types import RequestId

logger = logging.getLogger(__name__)

_STARTING_RETRY_S = 2


class Session:
    """One client's conversation with one engine, from Hello to the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[ToEngine], None], admission: Admission) -> None:
        self.admission = admission
        self.info: EngineInfo | None = None
        self.lifecycle = Lifecycle()
        self.death: ErrorInfo | None = None  # why no engine answers any more: it died, or this client was closed
        self._send = send
        self.loop = loop
        self._streams = StreamTable(loop, self._send_abort)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()  # ready or dead

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def require_info(self) -> EngineInfo:
        if self.death is not None:
            raise FailedUnavailable(self.death)
        if self.info is None:
            raise Unavailable("the engine is starting", code="starting", retry_after_s=_STARTING_RETRY_S)
        return self.info

    async def wait_ready(self, timeout_s: float | None) -> EngineInfo:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            message = f"the engine is not ready after {timeout_s:g} s"
            raise Unavailable(message, code="starting", retry_after_s=_STARTING_RETRY_S) from None
        return self.require_info()

    # ------------------------------------------------------------------ to the engine

    def submit(self, request: Submit) -> ClientStream:
        """Admits, opens the stream, sends; in this order, so that nothing was sent when it raises."""
        self.require_info()
        if self.lifecycle.is_draining:
            raise Draining
        permit = self.admission.admit(num_choices(request), sum(map(len, request.prompts)))
        try:
            stream = self._streams.open(request, permit)
        except BaseException:
            permit.release()
            raise
        self._send(request)
        return stream

    async def abort(self, request_ids: Sequence[RequestId] | None, names: Sequence[str] | None, reason: str) -> int:
        self.require_info()
        call_id, answer = self._open_call()
        self._send(
            Abort(
                call_id=call_id,
                request_ids=None if request_ids is None else tuple(request_ids),
                names=None if names is None else tuple(names),
                reason=reason,
            )
        )
        num_aborted = await self._wait(call_id, answer)
        assert isinstance(num_aborted, int)
        return num_aborted

    async def control(self, operation: str, arguments: dict[str, Any], trace_parent: str | None) -> dict[str, Any]:
        self.require_info()
        call_id, answer = self._open_call()
        self._send(Control(call_id=call_id, operation=operation, arguments=arguments, trace_parent=trace_parent))
        result = await self._wait(call_id, answer)
        assert isinstance(result, dict)
        return result

    # ------------------------------------------------------------------ from the engine

    def handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self._streams.deliver(message)
            case AbortDone(call_id, num_aborted):
                self._answer(call_id, num_aborted)
            case ControlDone(call_id, result, error):
                self._answer(call_id, result if error is not None else result or {}, error)
            case Lifecycle():
                self.lifecycle = message
            case EngineReady(info, protocol, lifecycle):
                self.lifecycle = lifecycle
                self._handle_ready(info, protocol)
            case EngineDead(reason):
                self.end(engine_dead(reason))

    def end(self, error: ErrorInfo) -> None:
        """No engine from now on: open streams and calls end with `error`. Idempotent; the first error stays."""
        if self.death is not None:
            return
        self.death = error
        num_streams = self._streams.end_all(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(FailedUnavailable(error))
        self._calls.clear()
        self._changed.set()
        if num_streams:
            logger.warning("%d open requests ended: %s", num_streams, error.message)

    def end_streams(self, error: ErrorInfo, reason: str) -> None:
        """Ends what is open, in the engine too, and stays usable."""
        if self.death is None and self._streams:
            ids = tuple(self._streams.request_ids())
            self._send(Abort(call_id=0, request_ids=ids, reason=reason))
        self._streams.end_all(error)

    def _handle_ready(self, info: EngineInfo, protocol: int) -> None:
        if protocol != PROTOCOL_VERSION:
            self.end(engine_dead(f"the engine speaks protocol {protocol}, this front end {PROTOCOL_VERSION}"))
            return
        self.info = info
        self._changed.set()

    def _send_abort(self, request_id: RequestId, choice: int | None, reason: str) -> None:
        if self.death is None:
            self._send(Abort(call_id=0, request_ids=(request_id,), choice=choice, reason=reason))

    def _open_call(self) -> tuple[int, asyncio.Future[Any]]:
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = self.loop.create_future()
        return call_id, answer

    async def _wait(self, call_id: int, answer: asyncio.Future[Any]) -> Any:
        try:
            return await answer
        finally:
            self._calls.pop(call_id, None)

    def _answer(self, call_id: int, result: Any, error: ErrorInfo | None = None) -> None:
        answer = self._calls.get(call_id)
        if answer is None or answer.done():  # nobody waits: an abort without a call, or a caller that was cancelled
            return
        if error is not None:
            answer.set_exception(FailedRequest(error, result))
        else:
            answer.set_result(result)


class FailedUnavailable(Unavailable):
    """Unavailable for the reason that an ErrorInfo gives."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, code=info.code, retry_after_s=info.retry_after_s)


def engine_dead(reason: str) -> ErrorInfo:
    return ErrorInfo(503, "unavailable", "engine_dead", f"the engine died: {reason}")


def closed() -> ErrorInfo:
    return ErrorInfo(503, "unavailable", "shutdown", "the server shut down before the request was finished")
