"""A new set of weights on its way in: checked as tensors come, packed as soon as a unit is complete.

The executor opens one per refresh. Tensors come under the names of any layout that the model has (its own file's, or
that of transformers, which trainers send). Nothing that serves is touched: the result is a new `WeightSet`, or nothing.
May be used in another thread than the steps, by one at a time. Errors are InvalidRequest and name the tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import CheckpointError, InvalidRequest
from headrace.kernels.ops import Backend, Formats, Packed
from headrace.models.config import DecoderConfig
from headrace.models.decoder import Decoder
from headrace.models.fused import split_experts
from headrace.models.plan import match_tensors
from headrace.models.registry import find_family
from headrace.models.shard import Shard
from headrace.models.units import Layout, Unit, WeightSet
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.incoming import apply_sparse, tensor_checksum
from headrace.weights.tensor import CheckpointTensor

ROUNDED_KINDS = ("w4", "w8")
_MAX_SHOWN = 5

ReadStored = Callable[[str], tuple[np.ndarray, str]]
"""A whole tensor of the weights in use by our name, float32, and the kind that it is stored in."""
_SAME = (
    "architecture",
    "vocab_size",
    "num_layers",
    "hidden_size",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "expert_size",
)


class WeightStage:
    """`layouts` are those that names may follow, the likeliest first; `formats` are what float tensors are rounded to,
    by unit. A delta has a `base`: the weights whose other tensors stay. What a rank does not hold is checked like all
    else, and not kept."""

    def __init__(
        self,
        backend: Backend,
        layouts: Sequence[Layout],
        shard: Shard,
        formats: Mapping[str, Formats],
        base: WeightSet | None = None,
        read_base: ReadStored | None = None,
    ) -> None:
        """`read_base` gathers a tensor of the base from all ranks, where there are several."""
        self._backend = backend
        self._shard = shard
        self._formats = formats
        self._packer = backend.packer()
        self._layouts = list(layouts)
        self._base = base
        self._read_base = read_base  # no method of its own as default: in a cycle, old weights would outlive their use
        self._layout: Layout | None = None  # decided by the first tensors
        self._units: Mapping[str, Unit] = {}
        self._unit_of: Mapping[str, str] = {}
        self._seen: set[str] = set()
        self._waiting: dict[str, CheckpointTensor] = {}  # whose units are not complete
        self._handles: dict[str, Packed] = {}
        self.num_bytes = 0
        self.pack_s = 0.0
        self.result: tuple[WeightSet, Decoder] | None = None  # set by the executor, of a finished stage

    @property
    def num_tensors(self) -> int:
        return len(self._seen)

    def add_path(self, path: Path) -> None:
        """All tensors of a folder or file, which must hold a model of the same shape."""
        self.take(self.checked_path(path))

    def checked_path(self, path: Path) -> Mapping[str, CheckpointTensor]:
        """What `add_path` would take, found sound, for `take`."""
        tensors = self.opened(path)
        self._check(tensors)
        return tensors

    def check_path(self, path: Path) -> None:
        """Raises what `add_path` would raise, without packing anything."""
        self.checked_path(path)

    def check(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Raises unless these are all tensors of the model, and sound. For a stage that is thrown away."""
        matched = self.matched(tensors)
        self._seen |= matched.keys()
        self._refuse_missing()
        self._seen.clear()
        self._check(matched)

    def opened(self, path: Path) -> Mapping[str, CheckpointTensor]:
        """All its tensors by our names; their numbers are not looked at."""
        try:
            checkpoint = open_checkpoint(path)
            family = find_family(checkpoint)
            layout = Layout(family.make_config(checkpoint), family.names)
            self._check_same_model(layout, path)
            tensors = match_tensors(checkpoint, layout.config, family.names)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="source") from error
        self._choose(layout)
        return tensors

    def add(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Tensors under names of one layout. All are checked before any is taken."""
        self.take(self.checked(tensors))

    def checked(self, tensors: Mapping[str, CheckpointTensor]) -> Mapping[str, CheckpointTensor]:
        """What `add` would take, found sound, for `take`."""
        matched = self.matched(tensors)
        self._check(matched)
        return matched

    def add_sparse(self, name: str, indices: np.ndarray, values: np.ndarray, checksum: str | None = None) -> None:
        """New values at flat places of a tensor; the others stay. `checksum` is that of the result, in float32."""
        self.add({name: self.changed(name, indices, values, checksum)})

    def changed(
        self, name: str, indices: np.ndarray, values: np.ndarray, checksum: str | None = None
    ) -> CheckpointTensor:
        """The whole tensor that a sparse change makes, for `add`."""
        if self._base is None:
            raise InvalidRequest(f"Tensor {name[:80]!r}: sparse changes need a delta refresh.", param="delta")
        if self._layout is None:
            self._choose(self._layouts[0])
        old = self._base_values(name, self._base)
        changed = apply_sparse(old, indices, values, name=name).reshape(old.shape)
        tensor = CheckpointTensor.from_floats(name, changed)
        if checksum is not None and tensor_checksum(tensor) != checksum:
            raise InvalidRequest(
                f"Tensor {name[:80]!r}: with the changes its checksum is not {checksum[:80]}: the old values differ.",
                param="checksums",
            )
        return tensor

    def _base_values(self, name: str, base: WeightSet) -> np.ndarray:
        """Of a tensor in the weights that are changed."""

        def read(ours: str) -> np.ndarray:
            values, kind = (self._read_base or self._read_own)(ours)
            if kind in ROUNDED_KINDS:
                raise InvalidRequest(
                    f"Tensor {name[:80]!r} is kept in {kind}: a sparse change would round it all anew; send it whole.",
                    param="source",
                )
            return values

        values = base.read(name, read)
        if values is None:
            raise self._unknown(name)
        return values

    def _read_own(self, ours: str) -> tuple[np.ndarray, str]:
        assert self._base is not None, "asked of a delta"
        return self._base.values(self._backend, ours), getattr(self._base.part(self._backend, ours), "kind", "")

    def missing(self) -> list[str]:
        """Names of tensors that must come before `finish`, as the source calls them."""
        if self._base is not None:
            return []
        layout = self._layout or self._layouts[0]
        return [layout.names.source_name(name) for name in layout.shapes if name not in self._seen]

    def finish(self) -> WeightSet:
        """The new set, ready to serve."""
        self.refuse_incomplete()
        assert self._layout is not None, "the first tensor chose it"
        if self._base is not None:
            self._complete_from_base()
        else:
            assert not self._waiting, "every unit is complete"
        base = self._base.handles if self._base is not None else {}
        return WeightSet(self._layout, {**base, **self._handles}, self._shard)

    def refuse_incomplete(self) -> None:
        """Raises what `finish` would raise."""
        self._refuse_missing()
        if not self._seen:
            raise InvalidRequest("The refresh has no tensors.", param="source")

    # ---------------------------------------------------------------------------------------------------------- checks

    def _choose(self, layout: Layout) -> None:
        if self._layout is not None and not self._layout.is_like(layout):
            raise InvalidRequest(
                "All tensors of a refresh must follow one layout: that of the model's file, or that of transformers.",
                param="source",
            )
        if self._base is not None and not self._base.layout.is_like(layout):
            raise InvalidRequest(
                "A delta must follow the layout of the weights that it changes: refresh once with all tensors first.",
                param="delta",
            )
        if self._layout is None:
            self._layout = layout
            self._units, self._unit_of = layout.units, layout.unit_of

    def _check_same_model(self, layout: Layout, path: Path) -> None:
        reference = self._layouts[0].config
        for field in _SAME:
            theirs, ours = _field(layout.config, field), _field(reference, field)
            if theirs != ours and not (field == "architecture" and _same_family(theirs, ours)):
                raise InvalidRequest(
                    f"{path}: {field} is {theirs}, but the model that is served has {ours}.", param="source"
                )

    def _known(self, name: str) -> str:
        assert self._layout is not None, "chosen before names are read"
        ours = self._layout.our_names.get(self._layout.names.normalise(name))
        if ours is None:
            raise self._unknown(name)
        return ours

    def _unknown(self, name: str) -> InvalidRequest:
        architecture = self._layouts[0].config.architecture
        return InvalidRequest(
            f"Tensor {name[:80]!r} is unknown: {architecture} has none of that name.",
            param="source",
        )

    def _refuse_missing(self) -> None:
        missing = self.missing()
        if missing:
            shown = ", ".join(missing[:_MAX_SHOWN]) + (", ..." if len(missing) > _MAX_SHOWN else "")
            raise InvalidRequest(f"{len(missing)} tensors have not come: {shown}.", param="source")

    def matched(self, tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
        """By our names, each known and of the right shape."""
        if not tensors:
            raise InvalidRequest("No tensors were given.", param="source")
        if self._layout is None:
            known = [sum(bool(layout.find(name)) for name in tensors) for layout in self._layouts]
            self._choose(self._layouts[known.index(max(known))])
        assert self._layout is not None, "chosen above"
        config, names, expected = self._layout.config, self._layout.names, self._layout.shapes
        matched: dict[str, CheckpointTensor] = {}
        for name, tensor in self._split(tensors).items():
            if names.is_ignored(names.normalise(name)):
                continue
            ours = self._known(name)
            if ours == "head.weight" and config.has_tied_head:
                continue  # a copy of the embedding, which trainers send along
            fitted = tensor.fitted(expected[ours])
            if fitted is None:
                raise InvalidRequest(
                    f"Tensor {name[:80]!r} has shape {list(tensor.shape)}; {list(expected[ours])} is needed.",
                    param="source",
                )
            if ours in matched or ours in self._seen:
                raise InvalidRequest(f"Tensor {name[:80]!r} came twice.", param="source")
            matched[ours] = fitted
        return matched

    def _split(self, tensors: Mapping[str, CheckpointTensor]) -> Mapping[str, CheckpointTensor]:
        assert self._layout is not None, "chosen before tensors are matched"
        try:
            return split_experts(tensors, self._layout.config.moe, self._layout.names)
        except CheckpointError as error:
            raise InvalidRequest(f"{str(error)[:1].upper()}{str(error)[1:]}.", param="source") from None

    # --------------------------------------------------------------------------------------------------------- packing

    def _check(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._seen:
                raise InvalidRequest(f"Tensor {tensor.name[:80]!r} came twice.", param="source")
            if not tensor.is_finite():
                raise InvalidRequest(f"Tensor {tensor.name[:80]!r} holds NaN or infinity.", param="source")

    def take(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Tensors that `checked` or `checked_path` gave, here or on another rank."""
        for name, tensor in tensors.items():
            self._seen.add(name)
            self.num_bytes += tensor.data.nbytes
            if self._shard.holds(self._unit_of[name]):
                self._waiting[name] = self._shard.cut(name, tensor)
                self._pack_if_complete(self._unit_of[name])
        # What still waits must not depend on the sender's memory, which may go after this call.
        for name in tensors:
            if (kept := self._waiting.get(name)) is not None:
                self._waiting[name] = CheckpointTensor(kept.name, kept.shape, kept.kind, kept.data.copy())

    def _pack_if_complete(self, unit_name: str) -> None:
        unit = self._units[unit_name]
        if all(name in self._waiting for name in unit.tensors):
            given = {name: self._waiting.pop(name) for name in unit.tensors}
            self._pack(unit_name, given)

    def _pack(self, unit_name: str, given: Mapping[str, Any]) -> None:
        assert self._layout is not None, "chosen before tensors are taken"
        formats, started_s = self._formats.get(unit_name, ()), time.perf_counter()
        self._handles[unit_name] = self._units[unit_name].pack(given, self._packer, self._layout.config, formats)
        self.pack_s += time.perf_counter() - started_s

    def _complete_from_base(self) -> None:
        """Units of which only some tensors came take the others from the weights that they change. Those that came are
        kept: the commit may still fail, and others of the unit come then."""
        base = self._base
        assert base is not None, "a delta has a base"
        for unit_name in {self._unit_of[name] for name in self._waiting}:
            given: dict[str, Any] = {
                name: self._waiting[name] if name in self._waiting else base.part(self._backend, name)
                for name in self._units[unit_name].tensors
            }
            self._pack(unit_name, given)


def _field(config: DecoderConfig, name: str) -> Any:
    """Of the configuration or of its experts; None where it has none."""
    return getattr(config, name) if hasattr(config, name) else getattr(config.moe, name, None)


def _same_family(one: str, other: str) -> bool:
    """gemma3 and gemma3_text are one family under two names, and GGUF files write qwen3moe for qwen3_moe."""
    return _plain(one) == _plain(other)


def _plain(architecture: str) -> str:
    return architecture.removesuffix("_text").replace("_", "").replace("-", "")
