"""Reads a GGUF file: metadata and tensors, as views of the mapped file.

Called by `checkpoint.py` for weights and by the tokenizer for its vocabulary. Every length, count and offset of the
file is checked against its size before it is used, so a corrupt or truncated file is a `CheckpointError` and never a
crash or a huge allocation. Arrays are decoded when they are first asked for (a vocabulary has 262,144 strings).
Writing is not done here.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import CheckpointError
from headrace.weights.tensor import CheckpointTensor, TensorKind, map_file

GGUFTensor = CheckpointTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4

STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

KINDS = {
    0: TensorKind.F32,
    1: TensorKind.F16,
    2: TensorKind.Q4_0,
    3: TensorKind.Q4_1,
    6: TensorKind.Q5_0,
    7: TensorKind.Q5_1,
    8: TensorKind.Q8_0,
    12: TensorKind.Q4_K,
    13: TensorKind.Q5_K,
    14: TensorKind.Q6_K,
    30: TensorKind.BF16,
}
# Names of kinds that exist but are not read here, for the error message.
OTHER_KINDS = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class _Cursor:
    """A position in the mapped file that only moves within it."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.size = len(buffer)
        self.position = 0

    def corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: corrupt or truncated GGUF file: {what}")

    def take(self, num_bytes: int, what: str) -> int:
        """Steps over `num_bytes` and returns where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.corrupt(f"{what} needs {num_bytes} bytes at {start}, the file ends at {self.size}")
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} is not UTF-8") from None

    def skip_strings(self, count: int, what: str) -> None:
        if count > (self.size - self.position) // 8:
            raise self.corrupt(f"{what} claims {count} strings")
        unpack, buffer, position, size = _U64.unpack_from, self.buffer, self.position, self.size
        for _ in range(count):  # written out: a vocabulary passes here at every start
            if position > size - 8:
                raise self.corrupt(what)
            position += 8 + unpack(buffer, position)[0]
        if position > size:
            raise self.corrupt(what)
        self.position = position


class _Metadata(Mapping[str, Any]):
    """The key-value part; a value is decoded when it is first asked for."""

    def __init__(self, cursor: _Cursor, count: int) -> None:
        self._cursor = cursor
        self._places: dict[str, tuple[int, int]] = {}  # key -> (type, where the value starts)
        self._values: dict[str, Any] = {}
        for i in range(count):
            key = cursor.string(f"key {i} of {count}")
            kind = cursor.u32(f"type of {key[:80]!r}")
            if key in self._places:
                raise cursor.corrupt(f"key {key[:80]!r} stands twice")
            self._places[key] = (kind, cursor.position)
            self._skip(kind, repr(key[:80]))

    def _skip(self, kind: int, what: str) -> None:
        cursor = self._cursor
        if kind == STRING:
            cursor.take(cursor.u64(what), what)
        elif kind == ARRAY:
            item_kind, count = cursor.u32(what), cursor.u64(what)
            if item_kind == STRING:
                cursor.skip_strings(count, what)
            elif item_kind in SCALARS:
                cursor.take(count * np.dtype(SCALARS[item_kind]).itemsize, what)
            else:
                raise cursor.corrupt(f"{what} is an array of type {item_kind}; strings and numbers are read")
        elif kind in SCALARS:
            cursor.take(np.dtype(SCALARS[kind]).itemsize, what)
        else:
            raise cursor.corrupt(f"{what} has unknown type {kind}")

    def _decode(self, key: str) -> Any:
        kind, self._cursor.position = self._places[key]
        cursor = self._cursor
        if kind == STRING:
            return cursor.string(repr(key))
        if kind != ARRAY:
            return np.frombuffer(cursor.buffer, SCALARS[kind], 1, cursor.position)[0].item()
        item_kind, count = cursor.u32(key), cursor.u64(key)
        if item_kind != STRING:
            array = np.frombuffer(cursor.buffer, SCALARS[item_kind], count, cursor.position)
            return array.copy()  # a few megabytes at most; does not keep the file mapped
        return self._decode_strings(key, count)

    def _decode_strings(self, key: str, count: int) -> list[str]:
        unpack, buffer, position = _U64.unpack_from, self._cursor.buffer, self._cursor.position
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                strings.append(buffer[start:position].decode())
        except UnicodeDecodeError:
            raise self._cursor.corrupt(f"{key!r} holds a string that is not UTF-8") from None
        return strings

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            if key not in self._places:
                raise KeyError(key)
            self._values[key] = self._decode(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class GGUFFile:
    """An open GGUF file. `metadata` values: numbers, booleans, strings, lists of strings, numpy arrays of numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        cursor = _Cursor(map_file(path), path)
        self._read_magic(cursor)
        num_tensors, num_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
        metadata = _Metadata(cursor, num_keys)
        self.metadata: Mapping[str, Any] = metadata
        tensor_infos_at = cursor.position
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise cursor.corrupt(f"general.alignment is {alignment!r}; a power of two is allowed")
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise cursor.corrupt("general.architecture is missing or not a string")
        self.architecture: str = architecture
        cursor.position = tensor_infos_at
        self.tensors: dict[str, GGUFTensor] = _read_tensors(cursor, num_tensors, alignment)

    @staticmethod
    def _read_magic(cursor: _Cursor) -> None:
        start = cursor.take(4, "the magic number")
        if cursor.buffer[start : start + 4] != MAGIC:
            raise CheckpointError(f"{cursor.path}: not a GGUF file (it does not start with 'GGUF')")
        version = cursor.u32("the version")
        if version.to_bytes(4, "big") in (v.to_bytes(4, "little") for v in VERSIONS):
            raise CheckpointError(f"{cursor.path}: a big-endian GGUF file; little-endian ones are read")
        if version not in VERSIONS:
            raise CheckpointError(f"{cursor.path}: GGUF version {version}; versions {VERSIONS} are read")


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    infos: dict[str, tuple[tuple[int, ...], TensorKind, int]] = {}
    for i in range(count):
        name = cursor.string(f"the name of tensor {i} of {count}")
        what = f"tensor {name[:80]!r}"
        if name in infos:
            raise cursor.corrupt(f"{what} stands twice")
        num_dims = cursor.u32(what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.corrupt(f"{what} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
        shape = tuple(reversed([cursor.u64(what) for _ in range(num_dims)]))  # the file has the fastest axis first
        kind_id = cursor.u32(what)
        offset = cursor.u64(what)
        kind = KINDS.get(kind_id)
        if kind is None:
            raise CheckpointError(
                f"{cursor.path}: {what} has type {OTHER_KINDS.get(kind_id, kind_id)};"
                f" supported: {', '.join(k.label for k in KINDS.values())}"
            )
        if 0 in shape or shape[-1] % kind.block_size:
            raise cursor.corrupt(f"{what} has shape {shape}, rows of {kind.label} are multiples of {kind.block_size}")
        if offset % alignment:
            raise cursor.corrupt(f"{what} starts at {offset}, which is no multiple of {alignment}")
        infos[name] = (shape, kind, offset)
    data_start = (cursor.position + alignment - 1) // alignment * alignment
    tensors = {}
    for name, (shape, kind, offset) in infos.items():
        cursor.position = data_start + offset
        num_bytes = kind.num_bytes(math.prod(shape))
        start = cursor.take(num_bytes, f"tensor {name[:80]!r}")
        tensors[name] = GGUFTensor(name, shape, kind, np.frombuffer(cursor.buffer, np.uint8, num_bytes, start))
    return tensors
