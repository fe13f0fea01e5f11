"""The channel: what every front end, the offline `LLM` class and RL trainers use to speak to an engine.

`InprocClient` (inproc.py) runs the engine in a thread of this process, `ZmqClient` (zmq.py) speaks to an engine
process; both pass one conformance suite. All methods belong to one asyncio event loop and none of them blocks it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headrace.errors import ErrorInfo
from headrace.transport.messages import EngineInfo, Submit
from headrace.transport.stats import REFRESH_SOURCES, STEP_TOKEN_BOUNDS, EngineStats
from headrace.types import FinishReason, LogprobRows, RequestId

_NO_STATS = EngineStats()


class Delta(msgspec.Struct, gc=False):
    """What is new of one choice. Deltas that nobody has read merge: a slow reader costs no memory but its tokens."""

    choice: int
    token_ids: list[int] = []
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    num_preemptions: int = 0
    weights_versions: tuple[
        tuple[int, str], ...
    ] = ()  # (index into token_ids, version from there on), where it changes
    embedding: bytes | None = None  # float32 [D], with the finish


class OutputStream(Protocol):
    """The outputs of one submitted request. Iterate it to the end, or `close()` it.

    Every choice gets exactly one Delta with a finish reason; after the last of these the iteration ends. If the engine
    dies, the open choices end with FinishReason.ERROR. It never raises for what happened to the request.
    """

    request_id: RequestId

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Yields all deltas that came since the last look, at most one per choice."""
        ...

    def abort_choice(self, choice: int) -> None:
        """Ends one choice in the engine, without waiting: a stop string matched. It still gets its terminal Delta."""
        ...

    def close(self, reason: str = "disconnect") -> None:
        """Aborts what still runs and forgets it, without waiting. Idempotent; harmless after the end."""
        ...


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One of several processes that a model is spread over. Rank 0 is the engine's own."""

    rank: int
    pid: int
    heartbeat_age_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Read from the status board or the engine's own counters; no round trip."""

    is_ready: bool
    reasons: tuple[str, ...] = ()  # why it is not ready: starting, draining, asleep, weights_poisoned, engine_dead, ...
    heartbeat_age_s: float = 0.0
    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    num_prompt_tokens: int = 0  # totals since start
    num_generated_tokens: int = 0
    num_step_tokens: int = 0  # tokens that steps computed
    steps_by_tokens: tuple[int, ...] = _NO_STATS.steps_by_tokens
    refreshes: tuple[int, ...] = _NO_STATS.refreshes
    refresh_us: tuple[int, ...] = _NO_STATS.refresh_us
    expert_balance_ppm: int = 0  # as in EngineStats
    worst_expert_balance_ppm: int = 0
    num_expert_rebalances: int = 0
    num_expert_failures: int = 0
    num_expert_bytes: int = 0
    ranks: tuple[RankStatus, ...] = ()  # where there are several
    weights_state: str = "ready"  # ready, asleep, updating, poisoned
    weights_reason: str | None = None  # why it is poisoned
    asleep: tuple[str, ...] = ()  # of weights, kv_cache
    is_paused: bool = False
    weights_version: str = "0"
    weights_epoch: int = 0  # counts the changes of the weights

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def step_buckets(self) -> list[tuple[float, int]]:
        """(most tokens, steps with so many and more than the bucket before)."""
        return list(zip((*STEP_TOKEN_BOUNDS, math.inf), self.steps_by_tokens, strict=True))

    @property
    def refresh_seconds(self) -> dict[str, tuple[int, float]]:
        """By the kind of its source: the number of committed refreshes, and what they took from begin to commit."""
        pairs = zip(self.refreshes, (microseconds / 1e6 for microseconds in self.refresh_us), strict=True)
        return dict(zip(REFRESH_SOURCES, pairs, strict=True))

    @property
    def expert_balance(self) -> dict[str, float]:
        """By what of the layers: their mean, the worst. Empty for a model without experts."""
        if not self.expert_balance_ppm:
            return {}
        return {"mean": self.expert_balance_ppm / 1e6, "worst": self.worst_expert_balance_ppm / 1e6}


class EngineClient(Protocol):
    """Submit, abort, control, status. Also the public Python interface for trainers."""

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved at start. Raises Unavailable before it was ready."""
        ...

    async def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        """Raises Unavailable when the engine died or the time is over."""
        ...

    def next_request_id(self) -> RequestId: ...

    def submit(self, request: Submit) -> OutputStream:
        """Admits and sends. Raises QueueFull (nothing was sent) or Unavailable (starting, draining, dead)."""
        ...

    async def abort(
        self,
        request_ids: Sequence[RequestId] | None = None,
        names: Sequence[str] | None = None,
        reason: str = "client",
    ) -> int:
        """Ends requests by this client's ids, by anybody's names, or all; returns how many choices were alive."""
        ...

    async def control(self, operation: str, *, trace_parent: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Runs a control operation and returns its operation object after its effect; with `wait=False` at once.

        docs/rl.md lists them. Raises RequestError as the engine reports it: FailedRequest, with the operation object if
        one was begun. `trace_parent` (W3C) names the trace that the object will carry.
        """
        ...

    def status(self) -> EngineStatus: ...

    async def close(self) -> None:
        """Ends open streams with ERROR and lets go of the engine. Idempotent."""
        ...
