"""The safetensors reader and `open_checkpoint`: what good folders hold, and one clear error for every bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headrace.errors import CheckpointError
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.safetensors import read_file, read_folder
from headrace.weights.tensor import TensorKind

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.linspace(-1, 1, 8, dtype=np.float16),
}


def raw_file(path: Path, header: Any, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_folder(tmp_path)
    assert set(tensors) == {"a", "b"}
    assert (tensors["a"].kind, tensors["b"].kind, tensors["a"].shape) == (TensorKind.F32, TensorKind.F16, (3, 4))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(tensors[name].dequantize(), array.astype(np.float32))


def test_shards(tmp_path: Path) -> None:
    save_file({"a": ARRAYS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": ARRAYS["b"]}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert set(read_folder(tmp_path)) == {"a", "b"}
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match="'a' is missing"):
        read_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "three.safetensors"}}))
    with pytest.raises(CheckpointError, match="No such file"):
        read_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        read_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": ["a"]}))
    with pytest.raises(CheckpointError, match="weight_map"):
        read_folder(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        read_folder(tmp_path)


def entry(dtype: str = "F32", shape: Any = (4, 4), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry("F8_E4M3", (8, 8)), "F8_E4M3; supported: F32, F16, BF16"),
        (entry(shape=(4, 5)), "cannot have 64 bytes"),
        (entry(shape=(-4, -4)), "cannot have 64 bytes"),
        (entry(shape=(0, 4), offsets=(0, 0)), "cannot have 0 bytes"),
        (entry(shape=(1 << 40, 1 << 40)), "cannot have"),
        (entry(offsets=(32, 96)), "truncated"),
        (entry(offsets=(-64, 0)), "truncated"),
        (entry(offsets=(64,)), "corrupt header entry"),
        (entry(shape="4"), "corrupt header entry"),
        ({"t": 5}, "corrupt header entry"),
        ([1], "corrupt safetensors header"),
        (b"{", "corrupt safetensors header"),
        (b"\xff\xfe", "corrupt safetensors header"),
        (b"[" * 100_000, "corrupt safetensors header"),
    ],
)
def test_bad_headers(header: Any, message: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x01", bytes(7), (1 << 62).to_bytes(8, "little") + b"{}"])
def test_files_too_short(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"empty|truncated"):
        read_folder(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    save_file(ARRAYS, folder / "good.safetensors")
    return (folder / "good.safetensors").read_bytes(), folder / "bad.safetensors"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_bits_raise_nothing_else(good: tuple[bytes, Path], data: st.DataObject) -> None:
    content, path = bytearray(good[0]), good[1]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        for tensor in read_file(path).values():
            tensor.dequantize()
        message = ""
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json"),
        ("{", "not a valid JSON object"),
        ("[]", "not a valid JSON object"),
        ("[" * 100_000, "not a valid JSON object"),
        ("{}", "model_type is missing"),
        ('{"model_type": 3}', "model_type is missing"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "gptq"),
        ('{"model_type": "llama", "quantization_config": 5}', "not supported"),
    ],
)
def test_bad_folders(config: str | None, message: str, tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no safetensors file"):
        open_checkpoint(tmp_path)
    save_file(ARRAYS, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).architecture == "llama"
