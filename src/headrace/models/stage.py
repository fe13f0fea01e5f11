"""A new set of weights on its way in: checked as tensors come, packed as soon as a unit is complete.

The executor opens one per refresh. Tensors come under the names of any layout that the model has (its own file's, or
that of transformers, which trainers send). Nothing that serves is touched: the result is a new `WeightSet`, or nothing.
May be used in another thread than the steps, by one at a time. Errors are InvalidRequest and name the tensor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import CheckpointError, InvalidRequest
from headrace.kernels.ops import Backend, Formats, Packed
from headrace.models.decoder import Decoder
from headrace.models.plan import expected_tensors, match_tensors
from headrace.models.registry import find_family
from headrace.models.units import Layout, Unit, WeightSet, units_of
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.incoming import apply_sparse, tensor_checksum
from headrace.weights.tensor import CheckpointTensor

_MAX_SHOWN = 5


class WeightStage:
    """`layouts` are those that names may follow, the likeliest first; `formats` are what float tensors are rounded to,
    by unit. A delta has a `base`: the weights whose other tensors stay."""

    def __init__(
        self,
        backend: Backend,
        layouts: Sequence[Layout],
        formats: Mapping[str, Formats],
        base: WeightSet | None = None,
    ) -> None:
        self._backend = backend
        self._formats = formats
        self._packer = backend.packer()
        self._layouts = list(layouts)
        self._base = base
        self._layout: Layout | None = None  # decided by the first tensors
        self._units: dict[str, Unit] = {}
        self._unit_of: dict[str, str] = {}
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
        self._take(self._open(path))

    def check_path(self, path: Path) -> None:
        """Raises what `add_path` would raise, without packing anything."""
        self._check(self._open(path))

    def check(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Raises unless these are all tensors of the model, and sound. For a stage that is thrown away."""
        matched = self._matched(tensors)
        self._seen |= matched.keys()
        self._refuse_missing()
        self._seen.clear()
        self._check(matched)

    def _open(self, path: Path) -> Mapping[str, CheckpointTensor]:
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
        self._take(self._matched(tensors))

    def add_sparse(self, name: str, indices: np.ndarray, values: np.ndarray, checksum: str | None = None) -> None:
        """New values at flat places of a tensor; the others stay. `checksum` is that of the result, in float32."""
        if self._base is None:
            raise InvalidRequest(f"Tensor {name[:80]!r}: sparse changes need a delta refresh.", param="delta")
        if self._layout is None:
            self._choose(self._layouts[0])
        ours, base = self._known(name), self._base
        part = base.part(self._backend, ours)
        if getattr(part, "is_quantized", False):
            raise InvalidRequest(
                f"Tensor {name[:80]!r} is kept in {part.kind}: a sparse change would round it all anew; send it whole.",
                param="source",
            )
        old = base.values(self._backend, ours)
        changed = apply_sparse(old, indices, values, name=name).reshape(old.shape)
        tensor = CheckpointTensor.from_floats(name, changed)
        if checksum is not None and tensor_checksum(tensor) != checksum:
            raise InvalidRequest(
                f"Tensor {name[:80]!r}: with the changes its checksum is not {checksum[:80]}: the old values differ.",
                param="checksums",
            )
        self.add({name: tensor})

    def missing(self) -> list[str]:
        """Names of tensors that must come before `finish`, as the source calls them."""
        if self._base is not None:
            return []
        layout = self._layout or self._layouts[0]
        return [layout.names.source_name(name) for name in expected_tensors(layout.config) if name not in self._seen]

    def finish(self) -> WeightSet:
        """The new set, ready to serve."""
        self._refuse_missing()
        if not self._seen:
            raise InvalidRequest("The refresh has no tensors.", param="source")
        assert self._layout is not None, "the first tensor chose it"
        if self._base is not None:
            self._complete_from_base()
        else:
            assert not self._waiting, "every unit is complete"
        base = self._base.handles if self._base is not None else {}
        return WeightSet(self._layout, {**base, **self._handles})

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
            self._units = units_of(layout.config)
            self._unit_of = {name: unit for unit, members in self._units.items() for name in members.tensors}

    def _check_same_model(self, layout: Layout, path: Path) -> None:
        reference = self._layouts[0].config
        for field in ("architecture", "vocab_size", "num_layers", "hidden_size", "num_kv_heads", "head_dim"):
            theirs, ours = getattr(layout.config, field), getattr(reference, field)
            if theirs != ours and not (field == "architecture" and _same_family(theirs, ours)):
                raise InvalidRequest(
                    f"{path}: {field} is {theirs}, but the model that is served has {ours}.", param="source"
                )

    def _known(self, name: str) -> str:
        assert self._layout is not None, "chosen before names are read"
        ours = _our_name(self._layout, name)
        if ours is None:
            raise InvalidRequest(
                f"Tensor {name[:80]!r} is unknown: {self._layout.config.architecture} has none of that name.",
                param="source",
            )
        return ours

    def _refuse_missing(self) -> None:
        missing = self.missing()
        if missing:
            shown = ", ".join(missing[:_MAX_SHOWN]) + (", ..." if len(missing) > _MAX_SHOWN else "")
            raise InvalidRequest(f"{len(missing)} tensors have not come: {shown}.", param="source")

    def _matched(self, tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
        """By our names, each known and of the right shape."""
        if not tensors:
            raise InvalidRequest("No tensors were given.", param="source")
        if self._layout is None:
            known = [sum(_our_name(layout, name) is not None for name in tensors) for layout in self._layouts]
            self._choose(self._layouts[known.index(max(known))])
        assert self._layout is not None, "chosen above"
        config, names = self._layout.config, self._layout.names
        expected = expected_tensors(config)
        matched: dict[str, CheckpointTensor] = {}
        for name, tensor in tensors.items():
            if names.is_ignored(names.normalise(name)):
                continue
            ours = self._known(name)
            if ours == "head.weight" and config.has_tied_head:
                continue  # a copy of the embedding, which trainers send along
            if tensor.shape != expected[ours]:
                raise InvalidRequest(
                    f"Tensor {name[:80]!r} has shape {list(tensor.shape)}; {list(expected[ours])} is needed.",
                    param="source",
                )
            if ours in matched or ours in self._seen:
                raise InvalidRequest(f"Tensor {name[:80]!r} came twice.", param="source")
            matched[ours] = tensor
        return matched

    # --------------------------------------------------------------------------------------------------------- packing

    def _check(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._seen:
                raise InvalidRequest(f"Tensor {tensor.name[:80]!r} came twice.", param="source")
            if not tensor.is_finite():
                raise InvalidRequest(f"Tensor {tensor.name[:80]!r} holds NaN or infinity.", param="source")

    def _take(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        self._check(tensors)
        for name, tensor in tensors.items():
            self._seen.add(name)
            self._waiting[name] = tensor
            self.num_bytes += tensor.data.nbytes
            self._pack_if_complete(self._unit_of[name])
        # What still waits must not depend on the sender's memory, which may go after this call.
        for name, tensor in self._waiting.items():
            if name in tensors:
                self._waiting[name] = CheckpointTensor(tensor.name, tensor.shape, tensor.kind, tensor.data.copy())

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


def _our_name(layout: Layout, name: str) -> str | None:
    return layout.our_names.get(layout.names.normalise(name))


def _same_family(one: str, other: str) -> bool:
    """gemma3 and gemma3_text are one family under two names."""
    return one.removesuffix("_text") == other.removesuffix("_text")
