"""Mixture-of-experts families: a random checkpoint of transformers gives the same logits here, under either of its
names for experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.kernels import create_backend
from headrace.models import load_model
from headrace.models.registry import find_family
from headrace.testing.steps import Runner
from headrace.weights.checkpoint import Checkpoint, open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 5,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
QWEN: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
ERNIE: dict[str, Any] = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20}
# (configuration class, model class, keys, which layers have experts)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], tuple[bool, ...]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        QWEN | {"head_dim": 16, "norm_topk_prob": True, "attention_bias": True, "mlp_only_layers": [1]},
        (True, False, True),
    ),
    "qwen3_moe-sliding": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        QWEN | {"use_sliding_window": True, "sliding_window": 7, "decoder_sparse_step": 2},
        (False, True, False),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        QWEN | {"shared_expert_intermediate_size": 28, "norm_topk_prob": True},
        (True, True, True),
    ),
    "qwen2_moe-sliding": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        QWEN
        | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2, "qkv_bias": False}
        | {"shared_expert_intermediate_size": 28},
        (True, True, True),
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},
        (True, True, True),
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3}, (True, True, True)),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", ERNIE, (False, True, True)),
    "ernie4_5_moe-biased": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        ERNIE
        | {"use_bias": True, "tie_word_embeddings": False, "moe_num_shared_experts": 0}
        | {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 2},
        (False, True, False),
    ),
}


def randomise(model: Any) -> Any:
    """Every parameter, so that a forgotten one shows; routers so that their choices are clear."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_((0.05 if "correction" in name else 0.3) * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else parameter.shape[-1] ** -0.5 * 1.5))
    return model.eval()


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    config_class, model_class, keys, _ = FAMILIES[request.param]
    config = getattr(transformers, config_class)(**(SIZES | keys), attn_implementation="eager")
    model = randomise(getattr(transformers, model_class)(config))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, folder, model


def expect(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("backend_name", ["reference", "reference-exact"])
def test_logits_equal_transformers(family: tuple[str, Path, Any], backend_name: str) -> None:
    name, folder, theirs = family
    backend = create_backend(backend_name)
    model = load_model(folder, backend)
    moe = model.weights.layout.config.moe
    assert moe is not None
    assert moe.moe_layers == FAMILIES[name][3]
    long, short = (np.random.default_rng(1).integers(0, 97, length).tolist() for length in (40, 23))
    expected = {0: expect(theirs, long), 1: expect(theirs, short)}
    runner = Runner(model, backend)

    # Whole, then in a batch with chunks of different length, then decoded token by token beside a prefill.
    assert_close(runner.step({10: long})[10], expected[0])
    first = runner.step({0: long[:13], 1: short[:1]})
    second = runner.step({1: short[1:18], 0: long[13:14]})
    rest = [runner.step({0: [long[t]], 1: [short[t + 4]]}) for t in range(14, 19)]
    last = runner.step({0: long[19:]})
    assert_close(np.concatenate([first[0], second[0], *(step[0] for step in rest), last[0]]), expected[0])
    assert_close(np.concatenate([first[1], second[1], *(step[1] for step in rest)]), expected[1])


def test_fused_names_are_the_same_weights(family: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, theirs = family
    theirs.save_pretrained(tmp_path, save_original_format=False)
    names = open_checkpoint(tmp_path).tensors
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert not any(".experts.0." in name for name in names)
    backend = create_backend("reference")
    fused, single = load_model(tmp_path, backend).weights, load_model(folder, backend).weights
    assert fused.differing(single, backend) == []
    assert fused.source_names() == single.source_names()


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "ernie4_5_moe"])
def test_defaults_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A configuration that is saved now leaves out nothing; older ones left out what equals the defaults."""
    getattr(transformers, FAMILIES[name][0])().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    full = Checkpoint(tmp_path, "safetensors", name, saved, {}, {})
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    short = Checkpoint(tmp_path, "safetensors", name, {key: saved[key] for key in kept}, {}, {})
    make_config = find_family(full).make_config
    assert make_config(short) == make_config(full)
