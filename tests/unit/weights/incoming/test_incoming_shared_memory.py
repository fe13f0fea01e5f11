"""Shared memory segments: read by name and manifest without a copy, and only when they are plainly the user's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import shared_memory as python_shared_memory

import numpy as np
import pytest

from headrace.errors import InvalidRequest
from headrace.testing.shared_tensors import SharedTensors
from headrace.weights.incoming import Manifest, read_shared_memory
from headrace.weights.incoming.shared_memory import DIRECTORY
from headrace.weights.tensor import TensorKind

pytestmark = pytest.mark.skipif(not os.path.isdir(DIRECTORY), reason=f"no {DIRECTORY} on this machine")

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([0x3F80, 0x4000], np.uint16),  # bfloat16 1 and 2
}


@pytest.fixture
def shared() -> Iterator[SharedTensors]:
    with SharedTensors(ARRAYS) as tensors:
        yield tensors


def test_reads_and_outlives_the_name(shared: SharedTensors) -> None:
    tensors = read_shared_memory(shared.name, shared.manifest)
    shared.close()
    shared.close()
    assert not os.path.exists(f"{DIRECTORY}/{shared.name}")
    np.testing.assert_array_equal(tensors["a"].dequantize(), ARRAYS["a"])
    assert tensors["b"].kind is TensorKind.BF16
    assert tensors["b"].dequantize().tolist() == [1.0, 2.0]
    assert not tensors["a"].data.flags.writeable


def test_it_is_a_mapping_and_not_a_copy(shared: SharedTensors) -> None:
    tensors = read_shared_memory(shared.name, shared.manifest)
    with open(f"{DIRECTORY}/{shared.name}", "r+b") as file:
        file.write(np.float32(7).tobytes())
    assert tensors["a"].dequantize()[0, 0] == 7


def test_a_segment_of_pythons_own_class() -> None:
    segment = python_shared_memory.SharedMemory(create=True, size=8)
    try:
        segment.buf[:] = np.array([1, 2], np.float32).tobytes()
        manifest = Manifest(names=("w",), dtypes=("float32",), shapes=((2,),))
        assert read_shared_memory(segment.name, manifest)["w"].dequantize().tolist() == [1, 2]
    finally:
        segment.close()
        segment.unlink()


def test_the_manifest_must_cover_it(shared: SharedTensors) -> None:
    manifest = Manifest(names=("a",), dtypes=("F32",), shapes=((2, 3),))
    with pytest.raises(InvalidRequest, match="bytes 24 to 28 of 28 belong to no tensor"):
        read_shared_memory(shared.name, manifest)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "../etc/passwd", "a\0b", "a\nb", "ü", "x" * 256])
def test_names_that_are_none(name: str, shared: SharedTensors) -> None:
    with pytest.raises(InvalidRequest, match="is no name of a segment; allowed: the ASCII name of a file in /dev/shm"):
        read_shared_memory(name, shared.manifest)


def test_what_is_no_segment(shared: SharedTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{shared.name}-x"
    path = f"{DIRECTORY}/{name}"

    def message() -> str:
        with pytest.raises(InvalidRequest) as caught:
            read_shared_memory(name, shared.manifest)
        return caught.value.message

    assert message() == f"shared memory segment {name!r} cannot be opened: No such file or directory."
    os.symlink(f"{DIRECTORY}/{shared.name}", path)
    assert message() == f"shared memory segment {name!r} cannot be opened: Too many levels of symbolic links."
    os.unlink(path)
    os.mkfifo(path)
    assert message() == f"shared memory segment {name!r} is not a regular file."
    os.unlink(path)
    open(path, "xb").close()
    assert message() == f"shared memory segment {name!r} is empty."
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert message() == f"shared memory segment {name!r} belongs to user {user}; only user {user + 1}'s are read."
    os.unlink(path)
