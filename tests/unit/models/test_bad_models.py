"""Models that cannot be served: one line that names what was found and what is allowed, always as CheckpointError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointError
from headrace.kernels import create_backend
from headrace.models import load_model
from headrace.testing.steps import Runner
from headrace.testing.tiny import write_safetensors, write_tiny_model
from headrace.testing.tiny_gguf import write_tiny_gguf
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.tensor import CheckpointTensor, TensorKind


def load(path: Path) -> None:
    """Loads and, when that works, runs a step: bad numbers must not raise there either."""
    backend = create_backend("reference")
    Runner(load_model(path, backend), backend, num_blocks=4).step({0: [1, 2, 3]})


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, create_backend("reference"))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


def rewrite(folder: Path, *, drop: str = "", add: CheckpointTensor | None = None) -> None:
    tensors = [t for name, t in open_checkpoint(folder).tensors.items() if name != drop]
    # The old file is mapped by what is written: the new one takes its place.
    write_safetensors(folder / "new.safetensors", [*tensors, *([add] if add else [])])
    (folder / "new.safetensors").replace(folder / "model.safetensors")


def tensor(name: str, *shape: int) -> CheckpointTensor:
    return CheckpointTensor(name, shape, TensorKind.F32, np.zeros(int(np.prod(shape)) * 4, np.uint8))


def test_missing_unknown_and_misshapen_tensors(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = write_tiny_model(tmp_path / "model")
    rewrite(folder, add=tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 8))
    load(folder)  # known and harmless
    rewrite(folder, add=tensor("model.layers.1.mlp.experts.0.weight", 3, 5))
    message = refusal(folder)
    assert "model.layers.1.mlp.experts.0.weight" in message
    assert "(3, 5)" in message
    rewrite(folder, drop="model.layers.1.mlp.experts.0.weight")
    rewrite(folder, drop=name)
    assert f"{name} of shape (64, 32) is missing" in refusal(folder)
    rewrite(folder, add=tensor(name, 32, 64))
    assert f"{name} has shape (32, 64), the config asks for (64, 32)" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model_type": "mamba"}, ("'mamba'", "llama, mistral, qwen2, qwen3, gemma3_text, gemma3, ernie4_5")),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            ("'longrope'", "default, linear, dynamic, llama3"),
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ("factor", "missing")),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, ("factor is -1", "above 0")),
        ({"rope_scaling": "linear"}, ("rope_scaling is 'linear'", "an object")),
        ({"rope_theta": float("inf")}, ("config.json",)),
        ({"hidden_act": "relu"}, ("'relu'", "silu")),
        ({"hidden_size": 0}, ("hidden_size is 0", "1 to")),
        ({"hidden_size": "32"}, ("hidden_size is '32'",)),
        ({"hidden_size": 1 << 40}, ("hidden_size is 1099511627776",)),
        ({"hidden_size": None}, ("hidden_size is missing",)),
        ({"num_hidden_layers": 10**6}, ("num_hidden_layers is 1000000", "1 to 1000")),
        ({"num_key_value_heads": 3}, ("4 attention heads", "3 key-value heads")),
        ({"head_dim": 15}, ("rotary dimension 15",)),
        ({"rms_norm_eps": -1e-6}, ("rms_norm_eps",)),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings is 'no'", "true, false")),
        ({"eos_token_id": 999}, ("999", "272")),
        ({"eos_token_id": "x"}, ("eos_token_id",)),
        ({"eos_token_id": [1, -4]}, ("eos_token_id",)),
    ],
)
def test_bad_configs(change: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("architecture", "change", "part"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention"]}, "1 layer types for 2 layers"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts per token; 1 to 8 are allowed"),
        ("qwen3_moe", {"num_experts": 10**6}, "num_experts is 1000000; allowed: 1 to 4096"),
        ("qwen3_moe", {"num_experts": 4096, "num_hidden_layers": 33}, "135168 experts in all layers; up to 131072"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1; allowed: a list of layer numbers"),
        ("qwen3_moe", {"moe_intermediate_size": "wide"}, "moe_intermediate_size is 'wide'"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; allowed: null"),
        ("ernie4_5_moe", {"use_bias": True, "tie_word_embeddings": True}, "a head with a bias that is tied"),
    ],
)
def test_bad_variants(architecture: str, change: dict[str, Any], part: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", architecture=architecture)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    assert part in refusal(folder)


def test_missing_and_misshapen_experts(tmp_path: Path) -> None:
    name, fused = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.down_proj"
    folder = write_tiny_model(tmp_path / "model", architecture="qwen3_moe", num_experts=4)
    rewrite(folder, drop=name)
    assert f"{name} of shape (24, 32) is missing" in refusal(folder)
    rewrite(folder, add=tensor(name, 32, 24))
    assert f"{name} has shape (32, 24), the config asks for (24, 32)" in refusal(folder)
    rewrite(folder, drop=name)
    rewrite(folder, add=tensor(name, 24, 32))
    load(folder)
    rewrite(folder, add=tensor("model.layers.0.mlp.experts.4.up_proj.weight", 24, 32))
    assert "1 tensors that qwen3_moe does not have" in refusal(folder)
    rewrite(folder, drop="model.layers.0.mlp.experts.4.up_proj.weight", add=tensor(fused, 3, 32, 24))
    assert "has shape [3, 32, 24]; needed are 4 experts, with the rows of down of each" in refusal(folder)
    rewrite(folder, drop=fused, add=tensor(fused, 4, 32, 24))
    assert f"'model.layers.0.mlp.experts.0.down_proj.weight' came twice, once as a part of {fused!r}" in refusal(folder)


def test_eos_of_both_files(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert load_model(folder, create_backend("reference")).eos_token_ids == (7, 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("fuzz")
    folder = write_tiny_model(
        base / "model", architecture="qwen2", hidden_size=8, intermediate_size=8, num_layers=1, head_dim=4
    )
    return folder, write_tiny_gguf(folder, base / "model.gguf")


def flip(content: bytes, data: st.DataObject, header: int) -> bytes:
    """Flips bits, mostly in the header: nearly all of a file is weights, where every byte is a number."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        end = header if data.draw(st.integers(0, 3)) else len(changed)
        changed[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(changed)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bits_in_gguf(files: tuple[Path, Path], data: st.DataObject) -> None:
    path = files[1].with_name("flipped.gguf")
    path.write_bytes(flip(files[1].read_bytes(), data, 2500))
    load_or_refuse(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bits_in_config(files: tuple[Path, Path], data: st.DataObject) -> None:
    original = files[0] / "config.json"
    good = original.read_bytes()
    try:
        original.write_bytes(flip(good, data, len(good)))
        load_or_refuse(files[0])
    finally:
        original.write_bytes(good)


def load_or_refuse(path: Path) -> None:
    try:
        load(path)
        message = ""
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
