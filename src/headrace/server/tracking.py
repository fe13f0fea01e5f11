"""Watches one request's raw outputs on their way to the assembler, for metrics, trace and log line; changes nothing.

`generation.py` wraps the client's stream in it. Stamps are this process's monotonic clock; queue and prefill times
are the engine's own durations. Histograms are observed once, when the request is over, and spans are made then.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.client.base import Delta, OutputStream
from headrace.errors import RequestError
from headrace.observability.prometheus import Metrics
from headrace.transport.messages import Submit
from headrace.types import FinishReason

if TYPE_CHECKING:
    from headrace.observability.otel import Trace


@contextmanager
def refusals_traced(trace: Trace | None, received: float) -> Iterator[None]:
    """The one span of a request that does not get to the engine."""
    try:
        yield
    except RequestError as error:
        if trace is not None:
            trace.child("preprocess", received, time.monotonic(), error=error.code)
        raise


class TrackedStream:
    """An `OutputStream` that counts. `finish()` once nothing more will be read."""

    __slots__ = ("_abort_reason", "_deltas", "_error", "_first_token", "_gaps", "_is_finished", "_last_row",
                 "_last_token", "_metrics", "_num_preemptions", "_open", "_prefill_s", "_queue_s", "_received",
                 "_stopped", "_stream", "_submit", "_submitted", "_trace", "_weights_version", "num_cached",
                 "num_choices", "num_generated", "reasons", "request_id")  # fmt: skip

    def __init__(
        self, stream: OutputStream, submit: Submit, metrics: Metrics, received: float, trace: Trace | None = None
    ) -> None:
        self.request_id = stream.request_id
        self.num_generated = 0
        self.num_cached = 0
        self.reasons: list[str] = []  # of the ended choices, in the order of their ends
        self._stream = stream
        self._deltas = aiter(stream)
        self._submit = submit
        self._metrics = metrics
        self._received = received
        self._trace = trace
        self._submitted = time.monotonic()
        self._last_row: float | None = None
        self._last_token: dict[int, float] = {}  # by choice
        self._gaps = metrics.histogram("inter_token_latency_seconds")
        self._first_token: float | None = None
        self._queue_s: float | None = None
        self._prefill_s: float | None = None
        self._num_preemptions = 0
        self._weights_version: str | None = None  # of the newest token
        self._error: str | None = None  # code of the first choice that failed
        self._abort_reason: str | None = None
        self._stopped: set[int] = set()  # choices that a stop string has ended
        self.num_choices = len(submit.prompts) * submit.params.n
        self._open = set(range(self.num_choices))
        self._is_finished = False

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        deltas = await self._deltas.__anext__()
        now = self._last_row = time.monotonic()
        for delta in deltas:
            self._see(delta, now)
        return deltas

    def abort_choice(self, choice: int) -> None:
        self._stopped.add(choice)
        self._stream.abort_choice(choice)

    def close(self, reason: str = "disconnect") -> None:
        """Tells the engine first, if there is anything left to end, and counts afterwards."""
        if self._open:
            self._stream.close(reason)
        for choice in self._open - self._stopped:
            self._abort(choice, reason)
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
        if self._trace is not None:
            self._record_spans(self._trace)

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
            "weights_version": self._weights_version,
            "abort_reason": self._abort_reason,
            **({} if self._error is None else {"error": self._error}),
        }

    def _record_spans(self, trace: Trace) -> None:
        """The engine's durations one after the other from the submit on; a phase that never ended lasts until the end
        of the request."""
        now = time.monotonic()
        fields = self.log_fields()
        counts = {
            "gen_ai.usage.input_tokens": fields["prompt_tokens"],
            "gen_ai.usage.output_tokens": fields["completion_tokens"],
            "headrace.cached_tokens": fields["cached_tokens"],
            "headrace.preemptions": self._num_preemptions,
        }
        trace.set(
            {
                **counts,
                "gen_ai.response.id": fields["id"],
                "gen_ai.response.finish_reasons": list(dict.fromkeys(self.reasons)),
                "headrace.internal_id": fields["internal_id"],
                "headrace.weights_version": self._weights_version,
                "headrace.abort_reason": self._abort_reason,
            }
        )
        last = self._last_row or now
        scheduled = last if self._queue_s is None else min(last, self._submitted + self._queue_s)
        trace.child("preprocess", self._received, self._submitted)
        trace.child("queue", self._submitted, scheduled)
        if self._queue_s is not None:
            first_token = last if self._prefill_s is None else min(last, scheduled + self._prefill_s)
            names = ("gen_ai.usage.input_tokens", "headrace.cached_tokens")
            trace.child("prefill", scheduled, first_token, {name: counts[name] for name in names})
            if self._prefill_s is not None:
                names = ("gen_ai.usage.output_tokens", "headrace.preemptions")
                trace.child("decode", first_token, last, {name: counts[name] for name in names})
        if self._last_row is not None:
            trace.child("postprocess", last, now)

    def _abort(self, choice: int, reason: str) -> None:
        self._abort_reason = self._abort_reason or reason
        self._metrics.count_aborts(reason)
        self._end(choice, "abort")

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
        if delta.weights_versions:
            self._weights_version = delta.weights_versions[-1][1]
        self._num_preemptions = max(self._num_preemptions, delta.num_preemptions)
        if delta.finish_reason is not None and choice in self._open:
            self._see_end(delta, delta.finish_reason)

    def _see_end(self, delta: Delta, reason: FinishReason) -> None:
        choice, code = delta.choice, None if delta.error is None else delta.error.code
        if reason is FinishReason.ABORT and choice in self._stopped:
            self._end(choice, "stop")
            return
        if code is not None or reason is FinishReason.ERROR:
            self._error = self._error or code or "internal_error"
        if reason is FinishReason.ABORT:
            self._abort(choice, "control" if code in (None, "aborted") else code)
        else:
            self._end(choice, reason.label)

    def _end(self, choice: int, reason: str) -> None:
        self._open.discard(choice)
        self.reasons.append(reason)
        self._metrics.count_finished(reason)
