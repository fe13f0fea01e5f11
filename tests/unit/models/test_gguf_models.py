"""A model loaded from GGUF computes what the same model from safetensors does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.kernels import create_backend
from headrace.models import load_model
from headrace.models.fused import split_experts
from headrace.models.names.gguf import GGUF
from headrace.models.plan import expected_tensors
from headrace.models.registry import find_family
from headrace.testing.steps import Runner
from headrace.testing.tiny import write_safetensors, write_tiny_model
from headrace.testing.tiny_gguf import write_tiny_gguf
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.tensor import CheckpointTensor, TensorKind

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500000.0,
}
GEMMA: dict[str, Any] = {"num_layers": 7, "sliding_window": 7, "query_pre_attn_scalar": 16, "has_tied_head": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"has_tied_head": True, "attention_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-yarn-rope": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-scaled": ("gemma3_text", GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "ernie4_5": ("ernie4_5", {}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": False, "shared_expert_intermediate_size": 40}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
}
# Every kind that can be made here, so that merged weights have parts of different kinds.
KINDS = {
    "q": "Q8_0",
    "k": "Q4_1",
    "v": "Q5_0",
    "o": "Q4_0",
    "gate": "Q5_1",
    "up": "BF16",
    "down": "F16",
    "embed": "Q8_0",
    "head": "F16",
}


def logits(path: Path, token_ids: list[int]) -> np.ndarray:
    backend = create_backend("reference")
    return Runner(load_model(path, backend), backend).step({0: token_ids})[0]


@pytest.mark.parametrize("name", list(MODELS))
def test_equals_safetensors(name: str, tmp_path: Path) -> None:
    architecture, options = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", architecture=architecture, **options)
    path = write_tiny_gguf(folder, tmp_path / "model.gguf")
    token_ids = np.random.default_rng(2).integers(0, 272, 60).tolist()
    expected = logits(folder, token_ids)
    np.testing.assert_allclose(logits(path, token_ids), expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    backend = create_backend("reference")
    ours, theirs = load_model(path, backend), load_model(folder, backend)
    for field in ("kv_spec", "name", "vocab_size", "max_model_len", "eos_token_ids"):
        assert getattr(ours, field) == getattr(theirs, field)


def test_mixed_kinds(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", architecture="qwen2")
    path = write_tiny_gguf(folder, tmp_path / "model.gguf", kinds=KINDS)
    stored = open_checkpoint(path).tensors
    assert len({tensor.kind for tensor in stored.values()}) == 8
    # The same numbers, dequantised, as safetensors.
    checkpoint = open_checkpoint(folder)
    family = find_family(checkpoint)
    tensors = []
    for name, shape in expected_tensors(family.make_config(checkpoint)).items():
        data = stored[GGUF.source_name(name)].dequantize().view(np.uint8).reshape(-1)
        tensors.append(CheckpointTensor(family.names.source_name(name), shape, TensorKind.F32, data))
    original = logits(folder, list(range(40)))
    write_safetensors(folder / "model.safetensors", tensors)
    np.testing.assert_array_equal(logits(path, list(range(40))), logits(folder, list(range(40))))
    assert np.abs(logits(folder, list(range(40))) - original).max() > 1e-3


@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen2", "qwen3", "gemma3", "ernie4_5", "qwen3moe", "qwen2moe", "olmoe", "ernie4_5-moe"],
)
def test_names_are_those_of_the_gguf_library(architecture: str) -> None:
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    modules = {"embed", "final_norm", "head", "attn_norm", "q", "k", "v", "o", "mlp_norm"}
    if "moe" in architecture:
        assert {f"blk.{{bid}}.{name.removesuffix('.weight')}" for name in list(GGUF.fused)[:3]} <= known
        modules |= {"router"}
    if architecture not in ("qwen3moe", "qwen2moe", "olmoe"):
        modules |= {"gate", "up", "down"}
    if architecture in ("qwen2moe", "ernie4_5-moe"):
        modules |= {"shared_gate", "shared_up", "shared_down"}
    if architecture == "qwen2moe":
        modules |= {"shared_expert_gate"}
    if architecture == "ernie4_5-moe":
        assert GGUF.source_name("layers.0.router.bias") == "blk.0.exp_probs_b.bias"
        assert "blk.{bid}.exp_probs_b" in known
    if architecture in ("qwen3", "gemma3", "qwen3moe", "olmoe"):
        modules |= {"q_norm", "k_norm"}
    if architecture == "gemma3":
        modules |= {"attn_post_norm", "mlp_post_norm"}
    for module in modules:
        whole = module in GGUF.modules
        name = GGUF.source_name(f"{module}.weight" if whole else f"layers.0.{module}.weight")
        assert name.removesuffix(".weight").replace("blk.0.", "blk.{bid}.") in known, module


def test_fused_experts_are_views_of_any_kind(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", architecture="qwen3_moe", num_experts=4, expert_size=32)
    path = write_tiny_gguf(folder, tmp_path / "model.gguf", kinds={"gate": "Q8_0", "up": "Q4_0", "down": "F16"})
    checkpoint, backend = open_checkpoint(path), create_backend("reference")
    config = find_family(checkpoint).make_config(checkpoint)
    weights = load_model(path, backend).weights
    parts = split_experts(checkpoint.tensors, config.moe, GGUF)
    for name, kind in (("gate", TensorKind.Q8_0), ("up", TensorKind.Q4_0), ("down", TensorKind.F16)):
        fused = checkpoint.tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert fused.kind == kind
        np.testing.assert_array_equal(
            weights.read(fused.name, lambda one: weights.values(backend, one)), fused.dequantize()
        )
        part = parts[f"blk.1.ffn_{name}.3.weight"]
        assert np.shares_memory(part.data, fused.data)
        np.testing.assert_array_equal(part.dequantize(), fused.dequantize()[3])


def test_gemma3_local_layers_have_their_own_rope(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", architecture="gemma3_text", **GEMMA)
    path = write_tiny_gguf(folder, tmp_path / "model.gguf")
    for place in (folder, path):
        checkpoint = open_checkpoint(place)
        config = find_family(checkpoint).make_config(checkpoint)
        assert [config.layer_rope(i).theta for i in range(7)] == [1e4] * 5 + [1e6, 1e4]
