"""Takes the engine's step messages apart: one `StepOutputs` of many requests -> the streams that readers iterate.

The hot path of a front end: no task and no queue per stream, one list append per choice and step, one wakeup per stream
that somebody waits for. What nobody has read yet merges into one Delta per choice. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable

from headrace.client.admission import Permit
from headrace.client.base import Delta
from headrace.errors import DeadlineExceeded, ErrorInfo
from headrace.transport.messages import RowDetail, StepOutputs, Submit
from headrace.types import FinishReason, RequestId

AbortSender = Callable[[RequestId, int | None, str], None]
"""Tells the engine to end a request, or one choice of it, without waiting for the answer."""

WAKES_PER_TURN = 64
"""Readers that wake in one turn of the event loop. With a thousand in one turn, every probe would wait for all of them,
and so would a new connection: uvloop accepts one per turn. Those who wait merge what comes meanwhile."""
DEADLINE_GRACE_S = 1.0  # what the engine gets to end a request at its deadline, before the stream ends by itself
_WAITING, _RUNNING, _ENDED = 0, 1, 2  # of a choice
_REASONS = (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


def num_choices(request: Submit) -> int:
    """How many endings a request gets: at least one, so that a refusal of "no choices" is heard too."""
    return max(1, len(request.prompts) * max(1, request.params.n))


class ClientStream:
    """`OutputStream` of both clients. One reader at a time."""

    __slots__ = ("_deadline", "_n", "_num_open", "_pending", "_permit", "_prompt_lens", "_state", "_table", "_waiter",
                 "request_id")  # fmt: skip

    def __init__(self, table: StreamTable, request: Submit, permit: Permit) -> None:
        self.request_id = request.request_id
        self._table = table
        self._permit = permit
        self._n = max(1, request.params.n)
        self._prompt_lens = [len(prompt) for prompt in request.prompts] or [0]  # zero once its tokens left the queue
        self._num_open = num_choices(request)
        self._state = bytearray(self._num_open)  # of each choice: _WAITING, _RUNNING, _ENDED
        self._pending: dict[int, Delta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        timeout_s = request.timeout_s
        if timeout_s is not None and math.isfinite(timeout_s):  # the engine refuses the others
            self._deadline = table.loop.call_later(timeout_s + DEADLINE_GRACE_S, self._expire, timeout_s)

    # ------------------------------------------------------------------ the reader's side

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._pending:
            if not self._num_open:
                raise StopAsyncIteration
            assert self._waiter is None, "a stream has one reader"
            self._waiter = self._table.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas = list(self._pending.values())
        self._pending = {}
        return deltas

    def abort_choice(self, choice: int) -> None:
        if self._state[choice] != _ENDED:
            self._table.send_abort(self.request_id, choice, "stop_string")

    def close(self, reason: str = "disconnect") -> None:
        if self._num_open:
            self._table.send_abort(self.request_id, None, reason)  # tell the engine first, forget afterwards
            self.end(FinishReason.ABORT, None)

    # ------------------------------------------------------------------ the table's side

    def push(self, choice: int, token_ids: list[int], finished: int, detail: RowDetail | None) -> None:
        """One row. Rows of a choice that has ended here already are dropped: a choice ends once."""
        state = self._state[choice]
        if state != _RUNNING:
            if state == _ENDED:
                return
            self._leave_queue(choice)
        delta = self._pending.get(choice)
        start = 0
        if delta is None:
            delta = self._pending[choice] = Delta(choice, token_ids)
        else:
            start = len(delta.token_ids)
            delta.token_ids.extend(token_ids)
        if detail is not None:
            _merge_detail(delta, detail)
            if detail.weights_version is not None:
                delta.weights_versions = (*delta.weights_versions, (start, detail.weights_version))
        if finished:
            delta.finish_reason = _REASONS[finished]
            self._end_choice(choice)
        if self._waiter is not None:
            self._table.wake(self._waiter)
            self._waiter = None

    def end(self, reason: FinishReason, error: ErrorInfo | None) -> None:
        """Ends the choices that are still open, from this side."""
        detail = RowDetail(row=0, error=error) if error is not None else None
        for choice, state in enumerate(bytes(self._state)):
            if state != _ENDED:
                self.push(choice, [], reason, detail)

    def _expire(self, timeout_s: float) -> None:
        """The engine, whose clock it is, has not ended it in time: it hangs, or is in a very long step."""
        self._table.send_abort(self.request_id, None, "deadline")
        self.end(FinishReason.ERROR, DeadlineExceeded(f"the request's deadline of {timeout_s:g} s has passed").info())

    def _leave_queue(self, choice: int) -> None:
        self._state[choice] = _RUNNING
        prompt = choice // self._n
        self._permit.release_part(1, self._prompt_lens[prompt])
        self._prompt_lens[prompt] = 0

    def _end_choice(self, choice: int) -> None:
        self._state[choice] = _ENDED
        self._num_open -= 1
        if not self._num_open:
            if self._deadline is not None:
                self._deadline.cancel()
            self._permit.release()
            self._table.forget(self.request_id)


def _merge_detail(delta: Delta, detail: RowDetail) -> None:
    if detail.logprobs is not None:
        delta.logprobs = detail.logprobs if delta.logprobs is None else delta.logprobs + detail.logprobs
    if detail.prompt_logprobs is not None:
        rows = delta.prompt_logprobs
        delta.prompt_logprobs = detail.prompt_logprobs if rows is None else rows + detail.prompt_logprobs
    if detail.num_cached_tokens is not None:
        delta.num_cached_tokens = detail.num_cached_tokens
    if detail.queue_s is not None:
        delta.queue_s = detail.queue_s
    if detail.prefill_s is not None:
        delta.prefill_s = detail.prefill_s
    if detail.stop_token_id is not None:
        delta.stop_token_id = detail.stop_token_id
    if detail.error is not None:
        delta.error = detail.error
    if detail.embedding is not None:
        delta.embedding = detail.embedding
    delta.num_preemptions = max(delta.num_preemptions, detail.num_preemptions)


class StreamTable:
    """The open streams of one client."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send_abort: AbortSender) -> None:
        self.loop = loop
        self.send_abort = send_abort
        self._streams: dict[int, ClientStream] = {}
        self._late: deque[asyncio.Future[None]] = deque()  # readers that wake in a later turn
        self._num_wakes = WAKES_PER_TURN  # left in this turn
        self._is_turn_counted = False

    def __len__(self) -> int:
        return len(self._streams)

    def request_ids(self) -> list[RequestId]:
        return [stream.request_id for stream in self._streams.values()]

    def open(self, request: Submit, permit: Permit) -> ClientStream:
        assert request.request_id not in self._streams, "a client's request ids are unique"
        stream = self._streams[request.request_id] = ClientStream(self, request, permit)
        return stream

    def forget(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """Now, or in a later turn of the event loop if enough readers wake in this one."""
        if not self._is_turn_counted:
            self._is_turn_counted = True
            self.loop.call_soon(self._begin_turn)
        if not self._num_wakes:
            self._late.append(waiter)
        elif not waiter.done():  # its reader may have been cancelled
            self._num_wakes -= 1
            waiter.set_result(None)

    def _begin_turn(self) -> None:
        self._num_wakes = WAKES_PER_TURN
        self._is_turn_counted = False
        for _ in range(min(WAKES_PER_TURN, len(self._late))):
            self.wake(self._late.popleft())

    def deliver(self, outputs: StepOutputs) -> None:
        """Rows of requests that were closed here meanwhile are dropped."""
        get = self._streams.get
        details = {detail.row: detail for detail in outputs.details}
        get_detail = details.get
        token_ids = outputs.token_ids
        start = 0
        columns = zip(outputs.request_ids, outputs.choices, outputs.num_tokens, outputs.finished, strict=True)
        for row, (request_id, choice, num_tokens, finished) in enumerate(columns):
            end = start + num_tokens
            stream = get(request_id)
            if stream is not None:
                stream.push(choice, token_ids[start:end], finished, get_detail(row) if details else None)
            start = end

    def end_all(self, error: ErrorInfo) -> int:
        """Every open choice ends with ERROR; returns how many streams there were."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.end(FinishReason.ERROR, error)
        return len(streams)
