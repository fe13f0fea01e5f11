"""Reads tensors out of one buffer by a manifest: the form of senders that pack bytes themselves. Nothing is copied.

The manifest is what the RL dialects send beside a broadcast: lists of names, dtypes and shapes, here with optional
offsets. `parse_dtype` is the one place that knows how frameworks spell a dtype.
"""

from __future__ import annotations

import msgspec

from headrace.errors import InvalidRequest
from headrace.weights.incoming.base import (
    Buffer,
    byte_view,
    check_count,
    check_cover,
    check_name,
    view_tensor,
)
from headrace.weights.tensor import CheckpointTensor, TensorKind

MAX_PADDING_BYTES = 4095  # senders that give offsets may align tensors, at most to a page

DTYPES = {
    "bfloat16": TensorKind.BF16,
    "bf16": TensorKind.BF16,
    "float16": TensorKind.F16,
    "f16": TensorKind.F16,
    "fp16": TensorKind.F16,
    "half": TensorKind.F16,
    "float32": TensorKind.F32,
    "f32": TensorKind.F32,
    "fp32": TensorKind.F32,
    "float": TensorKind.F32,
}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a buffer: one entry per tensor in each list; `offsets` are bytes, by default one after the other."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...] | None = None


def parse_manifest(raw: object) -> Manifest:
    """A manifest from decoded JSON; unknown fields are ignored, as other servers do."""
    try:
        return msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the manifest is wrong: {error}.") from None


def parse_dtype(name: str, dtype: str) -> TensorKind:
    """The kind that `dtype` means ("bfloat16", "torch.bfloat16", "BF16", ...) for the tensor `name`."""
    kind = DTYPES.get(dtype.removeprefix("torch.").lower())
    if kind is None:
        raise InvalidRequest(
            f"tensor {name[:80]!r} has dtype {dtype[:40]!r}; allowed: bfloat16, float16, float32 (or BF16, F16, F32)."
        )
    return kind


def read_raw(buffer: Buffer, manifest: Manifest) -> dict[str, CheckpointTensor]:
    """All tensors by name, as views of `buffer`; raises InvalidRequest where manifest and buffer disagree."""
    num_tensors = len(manifest.names)
    check_count(num_tensors)
    for field in ("dtypes", "shapes", "offsets"):
        values = getattr(manifest, field)
        if values is not None and len(values) != num_tensors:
            raise InvalidRequest(f"the manifest has {num_tensors} names and {len(values)} {field}; one each is needed.")
    data = byte_view(buffer)
    tensors: dict[str, CheckpointTensor] = {}
    ranges = []
    end = 0
    for i, name in enumerate(manifest.names):
        check_name(name, tensors)
        start = end if manifest.offsets is None else manifest.offsets[i]
        tensor = view_tensor(name, parse_dtype(name, manifest.dtypes[i]), manifest.shapes[i], data, start)
        tensors[name] = tensor
        end = start + tensor.data.size
        ranges.append((start, end, name))
    check_cover(ranges, data.size, 0 if manifest.offsets is None else MAX_PADDING_BYTES)
    return tensors
