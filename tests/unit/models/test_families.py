"""Every family: a random checkpoint saved by transformers gives the same logits here, however it is stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.kernels import create_backend
from headrace.models import load_model
from headrace.testing.steps import Runner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 5,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
# (configuration class, model class, keys): the window of 7 and llama3's 16 original positions are crossed by 40 tokens.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-1-heads": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4, "head_dim": 12}),
    "llama-biased-tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 500000.0}},
    ),
    "llama-linear-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-dynamic-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "qwen2-yarn": ("Qwen2Config", "Qwen2ForCausalLM", {"rope_parameters": YARN, "head_dim": 12}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"head_dim": 12}),
    "qwen2-sliding": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "head_dim": 12},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-gelu": ("Qwen3Config", "Qwen3ForCausalLM", {"attention_bias": True, "hidden_act": "gelu"}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3-scaled": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"use_bias": False}),
    "ernie4_5-biased": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"use_bias": True, "tie_word_embeddings": False}),
}
BACKENDS = ("reference", "reference-exact")


def randomise(model: Any, seed: int = 0) -> Any:
    """Every parameter: norms and biases too, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else parameter.shape[-1] ** -0.5 * 1.5))
    return model.eval()


def save(folder: Path, config_class: str, model_class: str, keys: dict[str, Any], **save_options: Any) -> Any:
    config = getattr(transformers, config_class)(**(SIZES | keys), attn_implementation="eager")
    model = randomise(getattr(transformers, model_class)(config))
    model.save_pretrained(folder, **save_options)
    return model


def expect(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(folder, *FAMILIES[request.param])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_logits_equal_transformers(family: tuple[Path, Any], backend_name: str) -> None:
    folder, theirs = family
    backend = create_backend(backend_name)
    model = load_model(folder, backend)
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (97, 256, (5,))
    rng = np.random.default_rng(1)
    long, short, other = (rng.integers(0, 97, length).tolist() for length in (40, 9, 23))
    expected = {0: expect(theirs, long), 1: expect(theirs, short), 2: expect(theirs, other)}
    runner = Runner(model, backend)

    # Whole, then in a batch with chunks of different length, then decoded token by token beside a prefill.
    assert_close(runner.step({10: long})[10], expected[0])
    first = runner.step({0: long[:13], 1: short[:3], 2: other[:1]})
    second = runner.step({2: other[1:18], 0: long[13:14], 1: short[3:]})
    rest = [runner.step({0: [long[t]], 2: [other[t + 4]]}) for t in range(14, 19)]
    last = runner.step({0: long[19:]})
    assert_close(np.concatenate([first[0], second[0], *(step[0] for step in rest), last[0]]), expected[0])
    assert_close(np.concatenate([first[1], second[1]]), expected[1])
    assert_close(np.concatenate([first[2], second[2], *(step[2] for step in rest)]), expected[2])


@pytest.mark.parametrize(("dtype", "shard"), [("bfloat16", "20KB"), ("float16", "1GB")])
def test_half_precision_and_shards(tmp_path: Path, dtype: str, shard: str) -> None:
    config = transformers.LlamaConfig(**SIZES, attn_implementation="eager")
    model = randomise(transformers.LlamaForCausalLM(config)).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    # Loaded anew: `model.float()` would keep rotary frequencies that were rounded to half precision.
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    backend = create_backend("reference")
    ours = Runner(load_model(tmp_path, backend), backend).step({0: list(range(30))})[0]
    assert_close(ours, expect(theirs, list(range(30))))


def test_text_part_of_multimodal_gemma3(tmp_path: Path) -> None:
    text = SIZES | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96, boi_token_index=95,
        eoi_token_index=94, attn_implementation="eager",
    )  # fmt: skip
    model = randomise(transformers.Gemma3ForConditionalGeneration(config))
    model.save_pretrained(tmp_path)
    backend = create_backend("reference")
    loaded = load_model(tmp_path, backend)
    token_ids = list(range(1, 40))
    assert_close(Runner(loaded, backend).step({0: token_ids})[0], expect(model, token_ids))
