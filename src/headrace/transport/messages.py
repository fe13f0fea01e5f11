"""Every type that crosses between a front end and the engine, as typed msgpack; no pickle anywhere.

One tagged union per direction. Fields are append-only: a field is added at the end, with a default, and never removed
or reordered (`tests/golden` holds the bytes). Per-token data travels as columns, one message per step and front end.
`transport/codec.py` encodes and decodes; nothing else knows the encoding.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import ErrorInfo
from headrace.types import LogprobRows, RequestId, SamplingParams

PROTOCOL_VERSION = 1


# ---------------------------------------------------------------------------------------------- front end -> engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a front end. A second one from the same `front_end` with another `incarnation` means that the
    old process died: the engine aborts what it had asked for."""

    front_end: int
    incarnation: str
    protocol: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One public request: every prompt times `params.n` choices, admitted all or none.

    Choice c belongs to prompt c // n; it is the pair (request_id, c) that names a sequence everywhere.
    """

    request_id: RequestId
    public_id: str  # for logs, traces and the reply
    aliases: tuple[str, ...] = ()  # other names by which an abort may find it
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams  # resolved: max_tokens and seed are set
    priority: int = 0  # lower runs earlier
    timeout_s: float | None = None  # from receipt by the engine, waiting included
    cache_salt: str | None = None
    trace_parent: str | None = None
    queue_timeout_s: float | None = None  # from receipt by the engine until one of its choices is started


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Ends requests; answered by `AbortDone` with the number of choices that were alive. Idempotent.

    `request_ids` are the sender's own; `names` are public ids or aliases of any front end's; both None: everything.
    `choice` narrows one request id to one of its choices. `reason` is for logs, metrics and the error text.
    """

    call_id: int
    request_ids: tuple[RequestId, ...] | None = None
    names: tuple[str, ...] | None = None
    choice: int | None = None
    reason: str = "client"


class Control(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    """A control operation by name; answered by `ControlDone` after its effect.

    The names and their arguments stand in engine/control/.
    """

    call_id: int
    operation: str
    arguments: dict[str, Any] = {}
    trace_parent: str | None = None


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The front end leaves in order; whatever it still had is aborted."""


ToEngine = Hello | Submit | Abort | Control | Goodbye


# ---------------------------------------------------------------------------------------------- engine -> front end


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine resolved at start; the front end validates against it."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    backend: str
    weights_version: str = "0"
    has_prefix_cache: bool = True
    embedding_size: int = 0  # numbers of an embedding; 0: there are none

    @property
    def max_kv_tokens(self) -> int:
        """The longest sequence that the whole KV memory can hold, in tokens."""
        return self.num_blocks * self.block_size


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True, tag="lifecycle"):
    """What state an engine's weights and memory are in; sent to every front end at each change."""

    state: str = "ready"  # ready, asleep, updating or poisoned
    reason: str | None = None  # why it is poisoned
    asleep: tuple[str, ...] = ()  # of weights, kv_cache
    pause_mode: str | None = None  # abort, wait or keep while paused
    version: str = "0"  # label of the weights
    epoch: int = 0  # counts the changes of the weights
    is_draining: bool = False  # new requests are refused until an undrain

    @property
    def is_paused(self) -> bool:
        return self.pause_mode is not None

    @property
    def is_serving(self) -> bool:
        """Whether steps may be computed."""
        return self.state == "ready" and self.pause_mode is None


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Answer to `Hello`, sent once the engine can serve."""

    info: EngineInfo
    protocol: int = PROTOCOL_VERSION
    lifecycle: Lifecycle = Lifecycle()


class RowDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What only some rows of a step have: the first one of a choice, one with logprobs, the last one."""

    row: int
    logprobs: LogprobRows | None = None  # one row per token of this output row
    prompt_logprobs: LogprobRows | None = None  # the next rows of the prompt, from its second token on
    num_cached_tokens: int | None = None  # on a choice's first row
    queue_s: float | None = None  # on a choice's first row: receipt -> first scheduled
    prefill_s: float | None = None  # on a choice's first row: first scheduled -> first token
    stop_token_id: int | None = None  # the stop or EOS token that ended it
    error: ErrorInfo | None = None  # with FinishReason.ERROR, or ABORT by the server
    num_preemptions: int = 0
    weights_version: str | None = None  # of this row's tokens and those after it; on a first row, and where it changes
    embedding: bytes | None = None  # float32 [D]: the pooled prompt, on a choice's only row


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """New tokens of one step, for one front end. Row i is choice `choices[i]` of `request_ids[i]`.

    It has `num_tokens[i]` tokens (0, or 1, or more in one step), the next ones of `token_ids`. `finished[i]` is 0 while
    it runs, else a FinishReason: the last row that this choice will ever have.
    """

    request_ids: list[int]
    choices: list[int]
    num_tokens: list[int]
    token_ids: list[int]
    finished: list[int]
    details: list[RowDetail] = []


class AbortDone(msgspec.Struct, frozen=True, tag="abort_done"):
    call_id: int
    num_aborted: int


class ControlDone(msgspec.Struct, frozen=True, tag="control_done"):
    """`result` is the operation object, beside the `error` of one that failed too; none if nothing was begun."""

    call_id: int
    result: dict[str, Any] | None = None
    error: ErrorInfo | None = None


class EngineDead(msgspec.Struct, frozen=True, tag="dead"):
    """Last words of an engine: nothing will come after this."""

    reason: str


FromEngine = EngineReady | Lifecycle | StepOutputs | AbortDone | ControlDone | EngineDead
