"""Splits tensors that hold all experts of a layer into one per expert, as views of their bytes.

GGUF files have such tensors, and so have models in the memory of a trainer (transformers from version 5 on); published
safetensors have one tensor per expert. Called before names are matched (`plan.py`, `stage.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import CheckpointError
from headrace.models.config import MoeConfig
from headrace.models.names.base import NameMap
from headrace.weights.tensor import CheckpointTensor


def stacked_modules(source_name: str, names: NameMap) -> tuple[str, ...] | None:
    """The modules of each expert that a fused tensor holds, None for any other tensor."""
    if not names.fused:
        return None
    place = names.layer_name(names.normalise(source_name))
    return None if place is None else names.fused.get(place[1])


def split_experts(
    tensors: Mapping[str, CheckpointTensor], moe: MoeConfig | None, names: NameMap
) -> Mapping[str, CheckpointTensor]:
    """The same tensors by name, fused ones in parts under the names of their experts. Raises CheckpointError, without
    a path, for a fused tensor of another shape and for a part that is there already."""
    if moe is None or not names.fused:
        return tensors
    out: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        modules = stacked_modules(name, names)
        parts = {name: tensor} if modules is None else _split(name, tensor, modules, moe, names)
        for part_name, part in parts.items():
            if part_name in out:
                raise CheckpointError(f"tensor {part_name[:80]!r} came twice, once as a part of {name[:80]!r}")
            out[part_name] = part
    return out


def fused_parts(source_name: str, moe: MoeConfig, names: NameMap) -> list[str] | None:
    """Our names of what a fused tensor holds, in order; None for any other tensor."""
    modules = stacked_modules(source_name, names)
    place = names.layer_name(names.normalise(source_name))
    if modules is None or place is None:
        return None
    return [f"layers.{place[0]}.experts.{e}.{module}.weight" for e in range(moe.num_experts) for module in modules]


def _split(
    source_name: str, tensor: CheckpointTensor, modules: tuple[str, ...], moe: MoeConfig, names: NameMap
) -> dict[str, CheckpointTensor]:
    """A tensor [E, modules * rows, columns]."""
    ours = fused_parts(source_name, moe, names)
    assert ours is not None, "a fused tensor is one of a layer"
    if len(tensor.shape) != 3 or tensor.shape[0] != moe.num_experts or tensor.shape[1] % len(modules):
        raise CheckpointError(
            f"tensor {source_name[:80]!r} has shape {list(tensor.shape)}; needed are {moe.num_experts} experts, with"
            f" the rows of {' and '.join(modules)} of each, as [{moe.num_experts}, rows, columns]"
        )
    shape = (tensor.shape[1] // len(modules), tensor.shape[2])
    num_bytes = tensor.kind.num_bytes(shape[0] * shape[1])
    parts: dict[str, CheckpointTensor] = {}
    for index, our_name in enumerate(ours):
        name = names.source_name(our_name)
        data = tensor.data[index * num_bytes : (index + 1) * num_bytes]
        parts[name] = CheckpointTensor(name, shape, tensor.kind, data)
    return parts
