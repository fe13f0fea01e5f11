"""The op interface: what a model definition may ask of a backend, and what one step hands to it.

A model (`models/decoder.py`) is written once against `Ops`, over opaque tensor handles. The numpy reference runs each
call at once; a compiled backend records the calls the first time and replays them for any number of rows. That is why a
model must not branch on a batch's contents: everything that varies from step to step stands in `StepInputs`.

Shape suffixes: T tokens of the step, D hidden, H query heads, G KV heads, K head size, F feed-forward, V vocabulary,
S sequences, R rows whose logits are wanted, B block-table width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step gives, valid until the next one."""

    logits_RV: np.ndarray  # float32
    best_R: np.ndarray  # int64, the first largest of each row; where the row is not finite it means nothing
    finite_R: np.ndarray  # bool, whether all of the row is finite


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


class Ops(Protocol):
    """One step's operations. The step's `StepInputs` and the KV memory are bound to the instance."""

    def embed(self, table: Packed) -> Tensor:
        """Rows of the [V, D] table for the step's tokens: [T, D]."""
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

    def formats(self, packed: Packed) -> Formats:
        """How the parts of a handle are stored; empty where everything is float32."""
        ...

    def parts(self, packed: Packed) -> tuple[list[Any], list[Any] | None]:
        """The parts of a handle and their biases, for a packer or `unpack`. Any thread."""
        ...

    def unpack(self, part: Any) -> np.ndarray:
        """What a part stands for, as float32 of the tensor's shape. Any thread."""
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
