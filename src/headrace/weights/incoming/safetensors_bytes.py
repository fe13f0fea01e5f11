"""Reads a whole safetensors file that came as bytes, such as the body of a request. Nothing is copied.

The header is parsed by `weights/safetensors.py`. A file from the wire is held to more than one from disk: names are
bounded, and every byte of data belongs to exactly one tensor, as the format demands.
"""

from __future__ import annotations

from headrace.errors import CheckpointError, InvalidRequest
from headrace.weights.incoming.base import Buffer, byte_view, check_count, check_cover, check_name
from headrace.weights.safetensors import read_buffer
from headrace.weights.tensor import CheckpointTensor


def read_safetensors_bytes(buffer: Buffer) -> dict[str, CheckpointTensor]:
    """All tensors by name, as views of `buffer`; raises InvalidRequest for bytes that are no such file."""
    try:
        tensors = read_buffer(memoryview(buffer).toreadonly(), "the safetensors payload")
    except CheckpointError as error:
        raise InvalidRequest(f"{error}.") from None
    check_count(len(tensors))
    data = byte_view(buffer)
    # A view does not know its offset, so it is found again as a distance of addresses.
    origin = data.ctypes.data + 8 + int.from_bytes(data[:8].tobytes(), "little")
    ranges = []
    for name, tensor in tensors.items():
        check_name(name, ())
        start = tensor.data.ctypes.data - origin
        ranges.append((start, start + tensor.data.size, name))
    check_cover(ranges, data.size - (origin - data.ctypes.data))
    return tensors
