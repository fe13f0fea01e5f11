"""The GGUF reader: what a good file says, and one clear error for every bad one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointError
from headrace.weights.gguf import GGUFFile
from headrace.weights.tensor import TensorKind

TOKENS = ["<s>", "é", "", "日本", "a" * 300]


def write(path: Path, alter: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A name")
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("flag", True)
    writer.add_uint64("large", 1 << 40)
    writer.add_int8("negative", -5)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.5, 2.0])
    writer.add_array("numbers", [1, -2, 3])
    alter(writer)
    rng = np.random.default_rng(0)
    writer.add_tensor("small.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    quantised = gguf.quantize(rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("large.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_all(path: Path) -> GGUFFile:
    """Everything that a user of the reader might ask for."""
    file = GGUFFile(path)
    for key in file.metadata:
        file.metadata[key]
    for tensor in file.tensors.values():
        tensor.dequantize()
    return file


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    file = read_all(write(tmp_path / "model.gguf"))
    assert file.architecture == "llama"
    scalars = ("general.name", "llama.block_count", "flag", "large", "negative")
    assert [file.metadata[key] for key in scalars] == ["A name", 3, True, 1 << 40, -5]
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert file.metadata["tokenizer.ggml.tokens"] == TOKENS
    np.testing.assert_array_equal(file.metadata["tokenizer.ggml.scores"], np.float32([0.5, -1.5, 2.0]))
    np.testing.assert_array_equal(file.metadata["numbers"], [1, -2, 3])
    assert "absent" not in file.metadata
    assert file.metadata.get("absent") is None
    small, large = file.tensors["small.weight"], file.tensors["large.weight"]
    assert (small.shape, small.kind, large.shape, large.kind) == ((2, 3), TensorKind.F32, (4, 64), TensorKind.Q8_0)
    np.testing.assert_array_equal(small.dequantize(), np.arange(6).reshape(2, 3))
    assert not small.data.flags.writeable


def test_alignment_other_than_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", lambda writer: writer.add_custom_alignment(256))
    np.testing.assert_array_equal(read_all(path).tensors["small.weight"].dequantize(), np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "truncated"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "general.architecture"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 61), "claims"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 61), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "array of type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "not UTF-8"),
    ],
)
def test_bad_headers(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="directory"):
        GGUFFile(tmp_path)


def patched(path: Path, found: bytes, replacement: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(found) == 1
    path.write_bytes(content.replace(found, replacement))
    return path


def tensor_info(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return struct.pack(f"<Q{len(name)}sI{len(dims)}QIQ", len(name), name, len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("name", "dims", "kind", "offset", "message"),
    [
        (b"small.weight", (3, 2), 23, 0, "IQ4_XS; supported: F32, F16"),
        (b"small.weight", (3, 2), 99, 0, "type 99; supported"),
        (b"small.weight", (3, 2), 8, 0, "multiples of 32"),
        (b"small.weight", (0, 2), 0, 0, "shape"),
        (b"small.weight", (1 << 40, 1 << 40), 0, 0, "truncated"),
        (b"small.weight", (3, 2), 0, 1 << 50, "truncated"),
        (b"small.weight", (3, 2), 0, 4, "no multiple of 32"),
        (b"large.weight", (3, 2), 0, 0, "stands twice"),
    ],
)
def test_bad_tensors(name: bytes, dims: tuple[int, ...], kind: int, offset: int, message: str, tmp_path: Path) -> None:
    good = tensor_info(b"small.weight", (3, 2), 0, 0)
    path = patched(write(tmp_path / "model.gguf"), good, tensor_info(name, dims, kind, offset))
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    content = write(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    end_of_data = GGUFFile(tmp_path / "model.gguf").tensors["large.weight"].data.size
    padding = -end_of_data % 32
    for size in range(0, len(content) - padding, 7):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            GGUFFile(path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    return write(folder / "good.gguf").read_bytes(), folder / "bad.gguf"


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_flipped_bits_raise_nothing_else(good: tuple[bytes, Path], data: st.DataObject) -> None:
    content, path = bytearray(good[0]), good[1]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        read_all(path)
        message = ""
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
