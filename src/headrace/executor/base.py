"""What the engine's core runs a step on. The core knows no process, socket or tensor; an executor knows no policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.eplb.layout import ExpertMap
from headrace.transport.plan import StepPlan, StepResult
from headrace.types import GrammarSpec
from headrace.weights.tensor import CheckpointTensor


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of the model."""

    name: str
    vocab_size: int  # rows of the head: valid token ids are [0, vocab_size)
    max_model_len: int  # the model's own limit, in tokens
    eos_token_ids: tuple[int, ...]
    backend: str
    kv_bytes_per_token: int
    weights_version: str = "0"
    num_ranks: int = 1
    hidden_size: int = 0  # numbers of an embedding; 0: it gives none


class Stage(Protocol):
    """New weights on their way in (models/stage.py). Used by one thread at a time, any. Raises InvalidRequest."""

    @property
    def num_bytes(self) -> int:
        """Of the tensors that have come."""
        ...

    @property
    def pack_s(self) -> float:
        """Seconds spent on packing so far."""
        ...

    @property
    def num_tensors(self) -> int: ...

    def add_path(self, path: Path) -> None:
        """All tensors of a folder or file."""
        ...

    def add(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Tensors by their checkpoint names, all or none. Their memory may go after the call."""
        ...

    def check_path(self, path: Path) -> None:
        """Raises what `add_path` would raise, without taking anything."""
        ...

    def check(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Raises unless these are all tensors of the model, and sound. Takes nothing."""
        ...

    def add_sparse(self, name: str, indices: np.ndarray, values: np.ndarray, checksum: str | None = None) -> None:
        """New values at flat places of a tensor; in a delta alone. `checksum` is that of the result, in float32."""
        ...

    def missing(self) -> list[str]:
        """Names that must still come."""
        ...


class ExpertMover(Protocol):
    """Brings a new expert map about (executor/expert_moves.py). Between steps, by the engine's thread."""

    num_bytes: int  # moved so far for the map that is open
    num_experts: int

    @property
    def bytes_per_expert(self) -> int:
        """Of one layer, all matrices."""
        ...

    def open(self, new: ExpertMap, rows: Sequence[int]) -> None:
        """Gets ready for some rows of a map; the others do not count. What was open is dropped."""
        ...

    def copy(self, max_bytes: int) -> Future[bool]:
        """Moves at most about so many bytes, while steps run; its result says whether any are left."""
        ...

    def place(self) -> None:
        """The next step runs with the new rows, on all ranks."""
        ...

    def remap(self, new: ExpertMap) -> None:
        """While there are no weights: those that come next lie as this map says."""
        ...

    def drop(self) -> None:
        """Forgets a map that was open, and what was moved for it. Idempotent."""
        ...


class Executor(Protocol):
    """Runs step plans in order on one or more ranks. Used by one thread, where nothing else is said."""

    @property
    def info(self) -> ModelInfo:
        """Known once the constructor has returned: the weights are loaded by then."""
        ...

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        """Reserves KV memory and the persistent batch. Called once, before the first step."""
        ...

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        """Compiles what outputs must match, beside the steps. A sequence with this grammar may come once it is done,
        and as long as the future is kept costs no more compiling. Ends with GrammarError if it cannot be followed."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end. A failure of one sequence is in the result; an exception ends the engine."""
        ...

    def check(self) -> None:
        """Raises when a rank has died. Cheap: asked at every turn of the engine's loop."""
        ...

    def close(self) -> None: ...

    # ------------------------------------------------------------------ weights and memory, between steps

    @property
    def weights_bytes(self) -> int:
        """Of a set of weights in memory."""
        ...

    def open_stage(self, *, is_delta: bool) -> Stage:
        """A place for a new set of weights; the old one is not touched."""
        ...

    def finish(self, stage: Stage) -> None:
        """Makes a stage ready to serve, while steps run. Any thread. Raises InvalidRequest if tensors are missing."""
        ...

    def swap(self, stage: Stage) -> None:
        """The next step computes with a stage's weights; the old ones are given back."""
        ...

    def close_stage(self, stage: Stage) -> None:
        """A stage that was not swapped in is given up, and what it holds is given back. Idempotent."""
        ...

    def drop_weights(self) -> None:
        """Gives the memory of the weights back; no step may come before a `swap`. Idempotent."""
        ...

    def weight_names(self) -> list[str]:
        """Of the tensors in use, as their source calls them; empty after `drop_weights`."""
        ...

    def read_weight(self, name: str) -> np.ndarray:
        """A tensor as it is used, float32 in the checkpoint's shape. Any thread. Raises NotFound."""
        ...

    def differing(self, stage: Stage) -> list[str]:
        """Names of tensors in use that differ from those of a stage that is complete. Any thread."""
        ...

    def free_kv(self) -> None:
        """Gives the KV memory back with all that it holds; no step may come before `restore_kv`. Idempotent."""
        ...

    def restore_kv(self) -> None:
        """KV memory again, with nothing in it. Idempotent."""
        ...

    # ------------------------------------------------------------------ experts, between steps

    @property
    def expert_map(self) -> ExpertMap | None:
        """Which expert lies in which slot; None unless whole experts are spread over the ranks."""
        ...

    @property
    def expert_layers(self) -> Sequence[int]:
        """Layers with experts; row i of the map is of the i-th."""
        ...

    @property
    def expert_moves(self) -> ExpertMover | None:
        """None where there is no other rank."""
        ...

    def take_expert_counts(self) -> np.ndarray | None:
        """Tokens that each slot was given since the last call: int64 [layers with experts, P]; None without experts.
        Any thread."""
        ...
