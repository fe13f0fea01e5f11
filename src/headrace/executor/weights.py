"""The weights of one rank: loading, refreshing, looking at them, and moving experts. No KV memory, no batch.

Rank 0's executor owns one, and so does every worker process. Used by one thread, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.eplb.layout import ExpertMap
from headrace.errors import NotFound
from headrace.kernels import Backend
from headrace.kernels.ops import Formats, Packed
from headrace.models import load_model
from headrace.models.decoder import Decoder
from headrace.models.shard import Sharding
from headrace.models.stage import ReadStored, WeightStage
from headrace.models.units import WeightSet
from headrace.runner import ModelShape


@dataclass(frozen=True, slots=True)
class WeightsInUse:
    """A set of weights and the model that computes with them."""

    set: WeightSet
    decoder: Decoder


@dataclass(frozen=True, slots=True)
class PreparedMap:
    """Another placement of experts, with all that it needs."""

    set: WeightSet
    held: dict[int, dict[int, tuple[Packed, Packed]]]  # of each layer that changes: gate_up and down, by slot


class RankWeights:
    """Loads in the constructor, which raises CheckpointError and ConfigError."""

    def __init__(self, model_path: Path, backend: Backend, sharding: Sharding) -> None:
        self._backend = backend
        model = load_model(model_path, backend, sharding)
        # Nothing else of the loaded model is kept: it would keep the first weights alive.
        self._layouts = model.layouts
        self.name = model.name
        self.shard = model.shard
        self.shape = ModelShape(
            kv_spec=model.kv_spec,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            hidden_size=model.decoder.config.hidden_size,
        )
        self._in_use: WeightsInUse | None = WeightsInUse(model.weights, model.decoder)
        self._formats = model.weights.formats(backend)  # of the last set, for one that comes when it has gone
        self._num_bytes = model.weights.num_bytes(backend)

    @property
    def num_bytes(self) -> int:
        """In memory; of the last set, when there is none."""
        return self._num_bytes if self.set is None else self.set.num_bytes(self._backend)

    @property
    def decoder(self) -> Decoder | None:
        """What the next step runs."""
        return None if self._in_use is None else self._in_use.decoder

    @property
    def set(self) -> WeightSet | None:
        return None if self._in_use is None else self._in_use.set

    # ------------------------------------------------------------------------------------------------------ refreshing

    def open_stage(self, *, is_delta: bool, read_base: ReadStored | None = None) -> WeightStage:
        assert self._in_use is not None or not is_delta, "a delta changes weights that are there"
        base = self.set if is_delta else None
        formats = self._formats if self.set is None else self.set.formats(self._backend)
        return WeightStage(self._backend, self._layouts, self.shard, formats, base, read_base)

    def finish(self, stage: WeightStage) -> None:
        """Any thread."""
        weights = stage.finish()
        decoder = weights.decoder(self._backend)
        self._backend.prepare(decoder)
        stage.result = weights, decoder

    def swap(self, stage: WeightStage) -> Decoder:
        assert stage.result is not None, "finish comes first"
        self._in_use = WeightsInUse(*stage.result)
        return self._in_use.decoder

    def drop(self) -> None:
        """Nothing may run before a `swap`."""
        if self.set is not None:
            self._formats, self._num_bytes = self.set.formats(self._backend), self.num_bytes
        self._in_use = None
        self._backend.forget()

    # --------------------------------------------------------------------------------------------------------- looking

    def names(self) -> list[str]:
        """Of all tensors, on whatever rank, as their source calls them."""
        return [] if self.set is None else self.set.source_names()

    def read(self, name: str, read_one: Callable[[str], np.ndarray] | None = None) -> np.ndarray:
        """A tensor by its source's name, float32. `read_one` gathers parts of it, by our names, from all ranks; without
        it they are all here. Raises NotFound."""
        weights = self.set
        values = None if weights is None else weights.read(name, read_one or (lambda ours: self.read_own(ours)[0]))
        if values is None:
            raise NotFound(f"There is no tensor {name[:80]!r}.", param="name")
        return values

    def read_own(self, ours: str) -> tuple[np.ndarray, str]:
        """This rank's rows of a tensor by our name, and the kind they are stored in. Only if `holds` it."""
        assert self.set is not None, "asked of weights that are there"
        return self.set.values(self._backend, ours), getattr(self.set.part(self._backend, ours), "kind", "")

    def holds(self, ours: str) -> bool:
        """Whether this rank has any rows of a tensor by our name."""
        return self.set is not None and self.shard.holds(self.set.layout.unit_of.get(ours, ours))

    def joined(self, ours: str, parts: list[np.ndarray]) -> np.ndarray:
        """A tensor from the rows of all ranks that hold any, in their order."""
        assert self.set is not None, "asked of tensors that were read"
        shapes = self.set.layout.shapes
        num_rows = (shapes.get(ours) or shapes["embed.weight"])[0]
        return parts[0] if len(parts[0]) == num_rows else np.concatenate(parts[:: self.shard.copies_of(ours)])

    def differing(self, stage: WeightStage) -> list[str]:
        ours, theirs = self.set, stage.finish()
        if ours is None:
            raise NotFound("There are no weights in use.")
        return ours.differing(theirs, self._backend)

    # --------------------------------------------------------------------------------------------------------- experts

    def prepare(self, experts: ExpertMap, taken: dict[str, Packed]) -> PreparedMap:
        """`taken` has the units of experts that are new on this rank, by name. Any thread."""
        assert self._in_use is not None, "experts move while there are weights"
        old, shard = self._in_use.set, self.shard.with_experts(experts)
        handles = {**old.handles, **taken}
        layers = [each for each in shard.moe_index if not np.array_equal(old.shard.slots(each), shard.slots(each))]
        for layer in layers:
            for expert in old.shard.held_experts(layer) - shard.held_experts(layer):
                for part in ("gate_up", "down"):
                    del handles[f"layers.{layer}.experts.{expert}.{part}"]
        weights = WeightSet(old.layout, handles, shard)
        return PreparedMap(weights, {layer: weights.held_experts(layer) for layer in layers})

    def place(self, prepared: PreparedMap) -> None:
        """The next step runs with this map."""
        assert self._in_use is not None, "experts move while there are weights"
        self.shard = prepared.set.shard
        for layer, held in prepared.held.items():
            placed = self._in_use.decoder.layers[layer].experts
            assert placed is not None, "a layer with experts"
            placed.place(self.shard.slots(layer), held)
        self._in_use = replace(self._in_use, set=prepared.set)

    def expert_formats(self) -> dict[str, Formats]:
        """Of the experts that this rank holds, or held when its weights went, by unit."""
        formats = self._formats if self.set is None else self.set.formats(self._backend)
        return {unit: kinds for unit, kinds in formats.items() if ".experts." in unit}

    def remap(self, slots: list[list[int]], formats: dict[str, Formats]) -> None:
        """While there are no weights: the next ones have their experts where this map says, packed as they were on
        whatever rank; `formats` has those of all ranks."""
        old = self.shard.experts
        assert old is not None, "experts are spread over ranks"
        assert self._in_use is None, "weights that are there are moved"
        self.shard = self.shard.with_experts(ExpertMap(np.array(slots), old.num_experts, old.num_ranks))
        self._formats = {**self._formats, **formats}

    def take_counts(self) -> np.ndarray | None:
        """Tokens that each slot was given since the last call: int64 [layers with experts, P]. Any thread."""
        decoder = self.decoder
        counts = [] if decoder is None else [e.experts.take_counts() for e in decoder.layers if e.experts is not None]
        return np.stack(counts) if counts else None
