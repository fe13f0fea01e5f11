"""The op interface: what a model definition may ask of a backend, and what one step hands to it.

A model (`models/decoder.py`) is written once against `Ops`, over opaque tensor handles. The numpy reference runs each
call at once; a compiled backend records the calls the first time and replays them for any number of rows. That is why a
model must not branch on a batch's contents: everything that varies from step to step stands in `StepInputs`.

Shape suffixes: T tokens of the step, D hidden, H query heads, G KV heads, K head size, F feed-forward, V vocabulary,
S sequences, R rows whose logits are wanted, U rows whose hidden states are, B block-table width, E experts, P physical
slots that hold experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

Tensor = Any
"""A backend's own handle of an activation, [T, ...] float."""
Packed = Any
"""A backend's own handle of a weight."""
Formats = tuple[str, ...]
"""Number formats of a handle's parts."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as arrays. Sequence s owns rows query_starts[s] to query_starts[s + 1] of the T tokens."""

    token_ids_T: np.ndarray  # int32
    positions_T: np.ndarray  # int32, absolute
    kv_slots_T: np.ndarray  # int64, where the token's K and V go: block id * block size + offset
    query_starts: np.ndarray  # int32 [S + 1]
    context_lens_S: np.ndarray  # int32, tokens of the sequence after this step
    block_tables_SB: np.ndarray  # int32, block ids; behind a sequence's own stands anything
    logit_rows_R: np.ndarray  # int32, indices into T
    hidden_rows_U: np.ndarray | None = None  # likewise; None: no row's


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step gives, valid until the next one."""

    logits_RV: np.ndarray  # float32
    best_R: np.ndarray  # int64, the first largest of each row; where the row is not finite it means nothing
    finite_R: np.ndarray  # bool, whether all of the row is finite
    hidden_UD: np.ndarray | None = None  # float32, the states that the head would see; None if none are wanted


class Draw(NamedTuple):
    """One token to draw; `runner/sampler.py` defines what each setting means."""

    row_V: np.ndarray  # float32, contiguous; finite but for banned tokens, which are -inf
    best: int  # the first largest of the row, not banned
    temperature: float  # not greedy
    top_k: int
    top_p: float
    min_p: float
    chance: float  # uniform in (0, 1)


DrawTokens = Callable[[list[Draw]], list[int]]
"""Token ids. What a draw gives depends on nothing beside it."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding (RoFormer, arXiv 2104.09864): inverse frequencies with any scaling already in them."""

    inv_freq: np.ndarray  # float32 [K / 2] (or half of the rotated part)
    is_interleaved: bool  # pairs are (0, 1), (2, 3), ...; else (i, i + K / 2)
    attention_scale: float = 1.0  # multiplies cos and sin (YaRN)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Shape and variant of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """How a router's scores choose experts.

    Scores become probabilities (`scoring`). The `num_per_token` experts with the highest probability plus correction
    bias are chosen, of equal ones the lowest index; their weights are the probabilities without the bias, divided by
    their sum if `is_normalised`, times `scale`. With `num_groups` above 1 only experts of the `num_groups_used` best
    groups count (DeepSeek-V3, arXiv 2412.19437); a group's worth is the sum of its `num_per_group_score` best.
    """

    num_experts: int
    num_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    norm_floor: float = 0.0  # the least sum that weights are divided by
    scale: float = 1.0
    num_groups: int = 1
    num_groups_used: int = 1
    num_per_group_score: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """One mixture-of-experts block: each chosen expert is a gated MLP."""

    routing: RoutingSpec
    activation: str
    inner_size: int  # F of one expert
    inner_sizes: tuple[int, ...] = ()  # of each rank's part, where every expert is cut across ranks; else each is whole
    output_sizes: tuple[int, ...] = ()  # likewise, of D


class Experts(Protocol):
    """One layer's experts as this rank holds them. P slots over all ranks; an expert with several slots has replicas.

    A token at position t goes to replica t modulo the number of replicas, in the order of the slots. Everything but
    `take_counts` belongs between steps.
    """

    def place(self, slots_P: np.ndarray, held: Mapping[int, tuple[Packed, Packed]]) -> None:
        """From the next step on slot p holds expert slots_P[p]. `held` has (gate and up, down) of the slots that this
        rank computes."""
        ...

    def take_counts(self) -> np.ndarray:
        """Tokens that each slot was given since the last call, on any rank: int64 [P]. Any thread."""
        ...


class Ops(Protocol):
    """One step's operations. The step's `StepInputs` and the KV memory are bound to the instance."""

    def embed(self, table: Packed, first_row: int | None = None) -> Tensor:
        """Rows of the [V, D] table for the step's tokens: [T, D]. With `first_row` the table is this rank's part of
        one that is cut by rows, and begins there."""
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor: ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Packed, eps: float) -> Tensor:
        """Over the last axis; `weight` has its length, so [T, H, K] with a [K] weight norms each head."""
        ...

    def linear(self, x: Tensor, weight: Packed) -> Tensor:
        """x [T, in] times the transpose of [out, in], plus the bias that was packed with it."""
        ...

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Along the last axis."""
        ...

    def heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[T, heads * K] seen as [T, heads, K]."""
        ...

    def rope(self, x_THK: Tensor, rope: RopeSpec) -> Tensor: ...

    def attention(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
        """Stores K and V of the step's tokens in the layer's paged memory, then attends causally: [T, H * K]."""
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up; `activation` is silu, gelu or gelu_tanh."""
        ...

    def moe(self, x: Tensor, scores_TE: Tensor, bias_E: Packed | None, experts: Experts, spec: MoeSpec) -> Tensor:
        """The chosen experts' outputs for x [T, D], weighted and added up in the order of choice: [T, D]."""
        ...

    def gate_rows(self, x: Tensor, gate_T1: Tensor) -> Tensor:
        """x [T, D] times the sigmoid of one number per row."""
        ...

    def gather(self, x: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
        """All ranks' columns side by side, in the order of ranks: [T, sum of sizes]. x is this rank's part, None where
        its size is 0."""
        ...

    def hidden_rows(self, x: Tensor, weight: Packed, eps: float) -> None:
        """Hands out the rows whose hidden states are wanted, after this norm. At most once in a model."""
        ...

    def logit_rows(self, x: Tensor) -> Tensor:
        """The rows whose logits are wanted: [R, D]."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""
        ...


class Model(Protocol):
    """What a backend runs: the decoder, as a function of ops alone."""

    def forward(self, ops: Ops) -> Tensor:
        """Logits [R, V]."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpec:
    """KV memory of a model: every layer holds K and V of shape [num_blocks, block_size, G, K]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def num_vectors_per_token(self) -> int:
        """K and V vectors of `head_dim` numbers that one token has."""
        return 2 * self.num_layers * self.num_kv_heads


class Packer(Protocol):
    """Packs one set of weights into memory of its own. Used by one thread, which need not be the backend's.

    A part is a checkpoint tensor or a part of another handle of the same backend, which is taken over as it is.
    `formats` are those of the handle that is replaced, one per part: float tensors are rounded to them.
    """

    def pack_linear(self, parts: list[Any], bias: list[Any] | None = None, formats: Formats = ()) -> Packed:
        """Stacks parts of shape [out_i, in] along `out` into one weight (bias parts likewise)."""
        ...

    def pack_table(self, tensor: Any, formats: Formats = ()) -> Packed:
        """An embedding table [V, D]; the same handle also serves `linear` (a tied head)."""
        ...

    def pack_vector(self, tensor: Any) -> Packed: ...


class Backend(Protocol):
    """Gives the ops a meaning, owns packed weights and KV memory. Used by one thread, where nothing else is said."""

    name: str

    def packer(self) -> Packer:
        """For a new set of weights, beside those that are in use."""
        ...

    def experts(self, num_experts: int) -> Experts:
        """A layer's experts, with nothing in it yet."""
        ...

    def formats(self, packed: Packed) -> Formats:
        """How the parts of a handle are stored; empty where everything is float32."""
        ...

    def parts(self, packed: Packed) -> tuple[list[Any], list[Any] | None]:
        """The parts of a handle and their biases, for a packer or `unpack`. Any thread."""
        ...

    def unpack(self, part: Any) -> np.ndarray:
        """What a part stands for, as float32 of the tensor's shape. Any thread."""
        ...

    def raw(self, part: Any) -> np.ndarray:
        """The bytes of a packed matrix, writable: uint8 [bytes]."""
        ...

    def blank(self, kind: str, rows: int, cols: int) -> Any:
        """A packed matrix of zeros, in memory of its own, for the bytes of another one. Any thread."""
        ...

    def prepare(self, model: Model) -> None:
        """Does ahead what the first step of a model would have to do. Any thread, while steps of another model run."""
        ...

    def forget(self) -> None:
        """Lets go of the model that ran last."""
        ...

    def free_kv(self) -> None:
        """Gives the KV memory back; `allocate_kv` comes before the next step."""
        ...

    def kv_bytes_per_token(self, spec: KVSpec) -> int:
        """KV memory of one token over all layers, scales included."""
        ...

    def allocate_kv(self, spec: KVSpec, num_blocks: int, block_size: int) -> None: ...

    def run(self, model: Model, inputs: StepInputs) -> StepOutputs:
        """One step. Raises nothing on any weight, finite or not."""
        ...

    @property
    def draw(self) -> DrawTokens | None:
        """The backend's own way to draw tokens; None where it leaves that to the runner's numpy."""
        ...
