"""What every reader of incoming weights checks alike: names, counts, shapes and ranges, with one wording per error.

Called by the readers of this package alone. Sizes are in bytes, and offsets count from the start of the buffer.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Sequence

import numpy as np

from headrace.errors import InvalidRequest
from headrace.weights.safetensors import MAX_DIMENSIONS
from headrace.weights.tensor import CheckpointTensor, TensorKind

Buffer = bytes | bytearray | memoryview | mmap.mmap

MAX_TENSORS = 1 << 18  # a mixture of experts with block scales may pass 100,000
MAX_NAME_LENGTH = 512
MAX_DIMENSION = 1 << 40  # keeps products of a hostile shape short; no tensor that fits in memory comes near

Range = tuple[int, int, str]
"""(first byte, byte after the last, tensor name)."""


def byte_view(buffer: Buffer) -> np.ndarray:
    """The buffer as read-only uint8 [bytes]; it is not copied and stays alive as long as a view of it does."""
    return np.frombuffer(memoryview(buffer).toreadonly(), np.uint8)


def check_name(name: str, seen: Collection[str]) -> None:
    """Refuses a name that is empty, too long, or among those `seen` before."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"tensor {name[:80]!r} has a name of {len(name)} characters; 1 to {MAX_NAME_LENGTH} are allowed."
        )
    if name in seen:
        raise InvalidRequest(f"tensor {name[:80]!r} is given twice; each name may come once.")


def check_count(num_tensors: int) -> None:
    if num_tensors > MAX_TENSORS:
        raise InvalidRequest(f"{num_tensors} tensors in one payload; {MAX_TENSORS} are allowed.")


def count_elements(name: str, shape: Sequence[int]) -> int:
    """Numbers in a tensor of `shape`, after the shape was found to be a sane one."""
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"tensor {name[:80]!r} has {len(shape)} dimensions; {MAX_DIMENSIONS} are allowed.")
    for dimension in shape:
        if not 0 <= dimension <= MAX_DIMENSION:
            raise InvalidRequest(
                f"tensor {name[:80]!r} has dimension {_brief(dimension)}; 0 to {MAX_DIMENSION} are allowed."
            )
    return math.prod(shape)


def view_tensor(name: str, kind: TensorKind, shape: Sequence[int], data: np.ndarray, start: int) -> CheckpointTensor:
    """The tensor that begins at byte `start` of `data`, in C order; nothing is copied."""
    end = start + kind.num_bytes(count_elements(name, shape))
    if start < 0 or end > data.size:
        raise InvalidRequest(
            f"tensor {name[:80]!r} of shape {list(shape)} and dtype {kind.label} lies at bytes {_brief(start)} to "
            f"{_brief(end)}; the buffer has {data.size}."
        )
    return CheckpointTensor(name, tuple(shape), kind, data[start:end])


def check_cover(ranges: Sequence[Range], size: int, padding: int = 0) -> None:
    """Refuses tensors that overlap, and bytes that belong to none: either means a wrong manifest.

    Gaps of at most `padding` bytes between tensors are allowed, for senders that align; after the last there is none.
    """
    covered, last = 0, ""
    for start, end, name in sorted(ranges):
        if start == end:
            continue
        if start < covered:
            raise InvalidRequest(f"tensors {last[:80]!r} and {name[:80]!r} overlap at byte {start}.")
        if start - covered > padding:
            raise InvalidRequest(f"bytes {covered} to {start} of {size} belong to no tensor; up to {padding} may not.")
        covered, last = end, name
    if covered != size:
        raise InvalidRequest(f"bytes {covered} to {size} of {size} belong to no tensor; none may be left over.")


def _brief(number: int) -> str:
    """An integer for a message; one of thousands of digits would not even convert."""
    return str(number) if abs(number) < 10**30 else "of more than 30 digits"
