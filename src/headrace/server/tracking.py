"""Watches one request's raw outputs on their way to the assembler, for metrics and the log line; changes nothing.

`generation.py` wraps the client's stream in it. Stamps are this process's monotonic clock; queue and prefill times
are the engine's own durations. Histograms are observed once, when the request is over.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from headrace.client.base import Delta, OutputStream
from headrace.observability.prometheus import Metrics
from headrace.transport.messages import Submit
from headrace.types import FinishReason


class TrackedStream:
    """An `OutputStream` that counts. `finish()` once nothing more will be read."""

    def __init__(self, stream: OutputStream, submit: Submit, metrics: Metrics, received: float) -> None:
        self.request_id = stream.request_id
        self.num_generated = 0
        self.num_cached = 0
        self.reasons: list[str] = []  # of the ended choices, in the order of their ends
        self._stream = stream
        self._submit = submit
        self._metrics = metrics
        self._received = received
        self._last_token: dict[int, float] = {}  # by choice
        self._gaps = metrics.histogram("inter_token_latency_seconds")
        self._first_token: float | None = None
        self._queue_s: float | None = None
        self._prefill_s: float | None = None
        self._num_preemptions = 0
        self._stopped: set[int] = set()  # choices that a stop string has ended
        self.num_choices = len(submit.prompts) * submit.params.n
        self._open = set(range(self.num_choices))
        self._is_finished = False

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        async for deltas in self._stream:
            now = time.monotonic()
            for delta in deltas:
                self._see(delta, now)
            yield deltas

    def abort_choice(self, choice: int) -> None:
        self._stopped.add(choice)
        self._stream.abort_choice(choice)

    def close(self, reason: str = "disconnect") -> None:
        """Tells the engine first, if there is anything left to end, and counts afterwards."""
        if self._open:
            self._stream.close(reason)
        for choice in self._open - self._stopped:
            self._metrics.count_aborts(reason)
            self._end(choice, "abort")
        for choice in tuple(self._open):
            self._end(choice, "stop")
        self.finish()

    def finish(self) -> None:
        """Observes the request. Idempotent."""
        if self._is_finished:
            return
        self._is_finished = True
        observe = self._metrics.observe
        last = max(self._last_token.values(), default=None)
        observe("request_prompt_tokens", sum(map(len, self._submit.prompts)))
        observe("request_generation_tokens", self.num_generated)
        observe("request_params_n", self._submit.params.n)
        observe("request_params_max_tokens", self._submit.params.max_tokens or 0)
        observe("e2e_request_latency_seconds", (last or time.monotonic()) - self._received)
        if self._queue_s is not None:
            observe("request_queue_time_seconds", self._queue_s)
        if self._prefill_s is not None:
            observe("request_prefill_time_seconds", self._prefill_s)
        if self._first_token is not None and last is not None:
            observe("time_to_first_token_seconds", self._first_token - self._received)
            observe("request_decode_time_seconds", last - self._first_token)

    def log_fields(self) -> dict[str, Any]:
        submit = self._submit
        return {
            "id": submit.public_id,
            "internal_id": submit.aliases[-1] if submit.aliases else None,
            "prompt_tokens": sum(map(len, submit.prompts)),
            "completion_tokens": self.num_generated,
            "cached_tokens": self.num_cached,
            "finish": ",".join(dict.fromkeys(self.reasons)) or None,
            "ttft_s": None if self._first_token is None else self._first_token - self._received,
            "queue_s": self._queue_s,
            "preemptions": self._num_preemptions or None,
        }

    def _see(self, delta: Delta, now: float) -> None:
        choice = delta.choice
        if num_tokens := len(delta.token_ids):
            self.num_generated += num_tokens
            before = self._last_token.get(choice)
            if before is not None:
                self._gaps.observe((now - before) / num_tokens, num_tokens)
            elif self._first_token is None:
                self._first_token = now
            self._last_token[choice] = now
        if delta.queue_s is not None and self._queue_s is None:
            self._queue_s = delta.queue_s
        if delta.prefill_s is not None and self._prefill_s is None:
            self._prefill_s = delta.prefill_s
        if delta.num_cached_tokens:
            self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        self._num_preemptions = max(self._num_preemptions, delta.num_preemptions)
        if delta.finish_reason is not None and choice in self._open:
            is_stop_string = choice in self._stopped and delta.finish_reason is FinishReason.ABORT
            if delta.finish_reason is FinishReason.ABORT and not is_stop_string:
                code = "aborted" if delta.error is None else delta.error.code
                self._metrics.count_aborts("control" if code == "aborted" else code)
            self._end(choice, "stop" if is_stop_string else delta.finish_reason.label)

    def _end(self, choice: int, reason: str) -> None:
        self._open.discard(choice)
        self.reasons.append(reason)
        self._metrics.count_finished(reason)
