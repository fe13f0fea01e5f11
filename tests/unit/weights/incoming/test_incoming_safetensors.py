"""A safetensors file as bytes: what the library writes is viewed, and more is demanded than of a file on disk."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from headrace.errors import InvalidRequest
from headrace.weights.incoming import read_safetensors_bytes

ARRAYS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.linspace(-1, 1, 8, dtype=np.float16)}


def entry(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def payload(header: Any, num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_reads_what_the_library_wrote(form: Any) -> None:
    buffer = form(save(ARRAYS, {"format": "pt"}))
    tensors = read_safetensors_bytes(buffer)
    assert list(tensors) == ["a", "b"]
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(tensors[name].dequantize(), array.astype(np.float32))
        assert np.shares_memory(tensors[name].data, np.frombuffer(buffer, np.uint8))
        assert not tensors[name].data.flags.writeable


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (b"", "the safetensors payload: corrupt or truncated safetensors file: header of 0 bytes in 0 bytes."),
        (bytes(7) + b"\x01", "the safetensors payload: corrupt or truncated safetensors file: header of "),
        (payload({"x" * 600: entry([1], 0, 4)}, 4), "tensor '" + "x" * 80 + "' has a name of 600 characters; 1 to 512"),
        (payload({"x": entry([1], 0, 4)}, 5), "bytes 4 to 5 of 5 belong to no tensor; none may be left over."),
        (payload({"x": entry([1], 4, 8)}, 8), "bytes 0 to 4 of 8 belong to no tensor; up to 0 may not."),
        (payload({"x": entry([2], 0, 8), "y": entry([1], 4, 8)}, 8), "tensors 'x' and 'y' overlap at byte 4."),
        (payload({"x": entry([1], 0, 4)}, 3), "the safetensors payload: tensor 'x' lies at 0 to 4 of 3 bytes"),
        (payload({"x": entry([1] * 9, 0, 4)}, 4), "the safetensors payload: tensor 'x' has 9 dimensions; 8 are"),
    ],
)
def test_errors(buffer: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_safetensors_bytes(buffer)
    assert caught.value.message.startswith(message)


@given(st.data())
def test_a_changed_payload_is_read_or_refused(data: st.DataObject) -> None:
    buffer = bytearray(save(ARRAYS))
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = read_safetensors_bytes(buffer[: data.draw(st.integers(0, len(buffer)))])
    except InvalidRequest:
        return
    assert sum(tensor.data.size for tensor in tensors.values()) <= len(buffer)
