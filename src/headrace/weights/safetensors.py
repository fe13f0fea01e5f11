"""Reads a folder of safetensors files: one file, or several that an index names. Nothing is copied.

Called by `checkpoint.py`, and by `incoming/` for a file that came as bytes. Our own reader because numpy has no
bfloat16 and because every offset is checked before use: a corrupt or truncated file is a `CheckpointError`. Writing is
not done here.

Format: github.com/huggingface/safetensors (header length as u64, JSON header, tensors).
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import CheckpointError
from headrace.weights.tensor import CheckpointTensor, TensorKind, map_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_JSON_BYTES = 64 << 20
MAX_DIMENSIONS = 8  # more would only make the product of a corrupt shape slow to compute
KINDS = {"F32": TensorKind.F32, "F16": TensorKind.F16, "BF16": TensorKind.BF16}


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    """The file that maps tensor names to shard files."""

    weight_map: dict[str, str]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a sane size."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes of JSON; {MAX_JSON_BYTES} are allowed")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a valid JSON object: {error}") from None


def read_folder(folder: Path) -> dict[str, CheckpointTensor]:
    """All tensors of the folder's checkpoint by name."""
    index = folder / INDEX_NAME
    if index.exists():
        return _read_shards(folder, index)
    files = [folder / SINGLE_NAME] if (folder / SINGLE_NAME).exists() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = f"{len(files)} safetensors files without {INDEX_NAME}" if files else "no safetensors file"
        raise CheckpointError(f"{folder}: {found}; needed: {SINGLE_NAME}, or shards with {INDEX_NAME}")
    return read_file(files[0])


def _read_shards(folder: Path, index: Path) -> dict[str, CheckpointTensor]:
    try:
        weight_map = msgspec.convert(read_json(index), _Index).weight_map
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{index}: {error}") from None
    shards: dict[str, dict[str, CheckpointTensor]] = {}
    tensors = {}
    for name, file_name in weight_map.items():
        if file_name not in shards:
            if Path(file_name).name != file_name:
                raise CheckpointError(f"{index}: shard {file_name[:80]!r} is not a plain file name")
            shards[file_name] = read_file(folder / file_name)
        if name not in shards[file_name]:
            raise CheckpointError(
                f"{folder / file_name}: tensor {name[:80]!r} is missing, though {INDEX_NAME} names it"
            )
        tensors[name] = shards[file_name][name]
    return tensors


def read_file(path: Path) -> dict[str, CheckpointTensor]:
    """All tensors of one file by name."""
    return read_buffer(map_file(path), str(path))


def read_buffer(buffer: mmap.mmap | memoryview, where: str) -> dict[str, CheckpointTensor]:
    """All tensors of a whole file in memory, as views of `buffer`; `where` begins every error."""
    size = len(buffer)
    header_bytes = int.from_bytes(buffer[:8], "little")
    if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{where}: corrupt or truncated safetensors file: header of {header_bytes} bytes in {size} bytes"
        )
    try:
        header = msgspec.json.decode(buffer[8 : 8 + header_bytes], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: corrupt safetensors header: {error}") from None
    header.pop("__metadata__", None)
    data = np.frombuffer(buffer, np.uint8)[8 + header_bytes :]
    return {name: _tensor(where, name, raw, data) for name, raw in header.items()}


def _tensor(where: str, name: str, raw: Any, data: np.ndarray) -> CheckpointTensor:
    what = f"{where}: tensor {name[:80]!r}"
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{what} has a corrupt header entry: {error}") from None
    kind = KINDS.get(entry.dtype)
    if kind is None:
        raise CheckpointError(f"{what} has dtype {entry.dtype[:20]}; supported: {', '.join(KINDS)}")
    if len(entry.shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{what} has {len(entry.shape)} dimensions; {MAX_DIMENSIONS} are allowed")
    start, end = entry.data_offsets
    if min(entry.shape, default=1) < 1 or end - start != math.prod(entry.shape) * kind.block_bytes:
        raise CheckpointError(f"{what} of shape {entry.shape} and dtype {entry.dtype} cannot have {end - start} bytes")
    if start < 0 or end > data.size:
        raise CheckpointError(f"{what} lies at {start} to {end} of {data.size} bytes: truncated or corrupt file")
    return CheckpointTensor(name, entry.shape, kind, data[start:end])
