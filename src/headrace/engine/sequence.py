"""A request inside the engine, and its sequences: one per (client, request id, choice), each with its state machine.

    WAITING ──► PREFILL ──► RUNNING ──► FINISHED(reason)        abort, deadline and error lead from every state
       ▲           │ ▲          │       straight to FINISHED
    (follower)     ▼ └──────────▼
                 PREEMPTED ◄────┘       blocks released; computes its tokens again from the front of the queue

The core is the only owner; the scheduler moves sequences between the first four states, the core alone ends them. Plain
state without policy: nothing here looks at a queue, a block or a clock.
"""

from __future__ import annotations

from concurrent.futures import Future
from enum import Enum
from typing import Any

from headrace.kv.hashing import HashChain
from headrace.kv.manager import BlockTable
from headrace.transport.messages import Submit
from headrace.types import FinishReason, RequestId, SamplingParams

NO_SLOT = -1


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILL, SequenceState.FINISHED}),
    SequenceState.PREFILL: frozenset({SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.PREFILL, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class PromptGroup:
    """The n choices of one prompt. The leader computes the prompt, the followers wait and then find its KV cached."""

    __slots__ = ("followers", "is_computed", "leader", "num_cached_tokens")

    def __init__(self) -> None:
        self.leader: Sequence | None = None
        self.followers: list[Sequence] = []
        self.is_computed = False  # from then on nobody leads and nobody follows
        self.num_cached_tokens: int | None = None  # what the prompt's first look-up found


class Request:
    """What the sequences of one `Submit` have in common."""

    __slots__ = (
        "arrival_s",
        "client",
        "deadline_s",
        "is_cacheable",
        "num_live",
        "ordinal",
        "preparation",
        "priority_key",
        "queue_deadline_s",
        "request_id",
        "sequences",
        "stop_ids",
        "submit",
    )

    def __init__(
        self,
        client: int,
        submit: Submit,
        *,
        ordinal: int,
        arrival_s: float,
        priority_key: float,
        stop_ids: frozenset[int],
        is_cacheable: bool,
    ) -> None:
        self.client = client
        self.submit = submit
        self.request_id: RequestId = submit.request_id
        self.ordinal = ordinal  # order of receipt, unique in this engine
        self.arrival_s = arrival_s
        self.priority_key = priority_key  # static: lower runs earlier
        self.stop_ids = stop_ids
        self.is_cacheable = is_cacheable  # other requests may reuse its KV, and it theirs
        self.deadline_s = None if submit.timeout_s is None else arrival_s + submit.timeout_s
        self.queue_deadline_s = None if submit.queue_timeout_s is None else arrival_s + submit.queue_timeout_s
        self.sequences: list[Sequence] = []  # by choice
        self.num_live = 0
        self.preparation: Future[Any] | None = None  # of its grammar

    @property
    def has_started(self) -> bool:
        return any(seq.first_scheduled_s is not None for seq in self.sequences)

    @property
    def is_prepared(self) -> bool:
        """Whether the executor knows all that it needs for this request."""
        return self.preparation is None or self.preparation.done()


class Sequence:
    """One choice of a request."""

    __slots__ = (
        "chain",
        "choice",
        "finish_reason",
        "first_scheduled_s",
        "group",
        "is_first_row_sent",
        "max_total_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "output",
        "params",
        "prompt",
        "request",
        "seed",
        "slot",
        "state",
        "table",
        "told_version",
    )

    def __init__(
        self,
        request: Request,
        choice: int,
        group: PromptGroup,
        prompt: tuple[int, ...],
        *,
        seed: int,
        max_total_tokens: int,
    ) -> None:
        self.request = request
        self.choice = choice
        self.group = group
        self.prompt = prompt
        self.params: SamplingParams = request.submit.params
        self.seed = seed
        self.max_total_tokens = max_total_tokens  # prompt and output together
        self.output: list[int] = []
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.num_computed = 0  # tokens whose KV lies in the table's blocks
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.slot = NO_SLOT
        self.table: BlockTable | None = None
        self.chain: HashChain | None = None
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # rows that were sent already
        self.first_scheduled_s: float | None = None
        self.is_first_row_sent = False
        self.told_version: str | None = None  # of the weights, as its client knows it

    def __repr__(self) -> str:
        request = self.request
        return f"Sequence({request.client}/{request.request_id}/{self.choice} {self.state.value})"

    @property
    def is_live(self) -> bool:
        return self.state is not SequenceState.FINISHED

    def move(self, state: SequenceState) -> None:
        assert state in _NEXT[self.state], f"{self!r} cannot become {state.value}"
        self.state = state

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a sampled token; says whether it ends the sequence."""
        self.output.append(token_id)
        self.num_tokens += 1
        # A grammar comes before min_tokens: it lets an end come early only where nothing else may follow.
        is_end_allowed = len(self.output) > self.params.min_tokens or self.params.grammar is not None
        if token_id in self.request.stop_ids and is_end_allowed:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_total_tokens else None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids [start, stop) of the prompt and the output behind it."""
        border = self.num_prompt_tokens
        if start >= border:
            return self.output[start - border : stop - border]
        if stop <= border:
            return list(self.prompt[start:stop])
        return [*self.prompt[start:], *self.output[: stop - border]]

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the cache.

        The last one is always computed, because its logits are needed; and so is every token whose prompt logprobs
        have not been sent: row r needs the logits at position r. A mean needs every token of the prompt.
        """
        if self.params.pooling == "mean":
            return 0
        if self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1:
            return self.num_prompt_logprobs
        return self.num_tokens - 1
