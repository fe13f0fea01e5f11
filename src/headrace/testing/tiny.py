"""Writes tiny random models that load like real ones: config.json, model.safetensors and a byte-level tokenizer.

For tests and for trying the server without a download. numpy alone: neither torch nor transformers. Token ids 0 to
255 are bytes; then come <bos>, <eos>, <|im_start|>, <|im_end|>, and unused special tokens up to the vocabulary's
size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.plan import expected_tensors
from headrace.models.registry import FAMILIES
from headrace.weights.checkpoint import Checkpoint
from headrace.weights.tensor import CheckpointTensor, TensorKind

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
MOE_KEYS = {
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "mixtral": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "olmoe": ("num_experts", "num_experts_per_tok", "intermediate_size"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k", "moe_intermediate_size"),
}
"""What config.json calls the number of experts, those per token, and the inner size of one."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(  # budget: every parameter is one dimension of the model
    folder: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    vocab_size: int = 272,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 64,
    max_positions: int = 2048,
    has_tied_head: bool = False,
    num_experts: int = 8,
    num_experts_per_token: int = 2,
    expert_size: int = 24,
    router_skew: float = 0.0,
    **config: Any,
) -> Path:
    """A model of `architecture` (a model_type of the registry) in `folder`, which is made; returns the folder.

    `config` adds or replaces keys of config.json. The same arguments give the same bytes. The sizes of experts matter
    to architectures that have some; with a `router_skew` (2 is much) a few experts get most of the tokens.
    """
    assert vocab_size >= 256 + len(SPECIAL_TOKENS), "bytes and special tokens must fit"
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": has_tied_head,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, IM_END],
    }
    if architecture in MOE_KEYS:
        sizes = (num_experts, num_experts_per_token, expert_size)
        values |= dict(zip(MOE_KEYS[architecture], sizes, strict=True))
        values |= {"norm_topk_prob": True}
    values |= config
    _write_json(folder / "config.json", values)
    _write_weights(folder, values, np.random.default_rng(seed), router_skew)
    _write_tokenizer(folder, vocab_size, max_positions)
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, values: dict[str, Any], rng: np.random.Generator, router_skew: float) -> None:
    """Matrices keep the size of what passes through; the head is stretched so that its choice is clear and varies."""
    family = FAMILIES["safetensors"][values["model_type"]]
    config = family.make_config(Checkpoint(folder, "safetensors", values["model_type"], values, {}, {}))
    tensors = []
    for name, shape in expected_tensors(config).items():
        source_name = family.names.source_name(name)
        if name.endswith("norm.weight"):
            numbers = 1.0 - config.norm_offset + 0.2 * rng.standard_normal(shape)
        elif name.endswith("router.bias"):
            numbers = 0.02 * rng.standard_normal(shape)
        elif name.endswith(".bias"):
            numbers = 0.2 * rng.standard_normal(shape)
        elif name == "embed.weight":
            numbers = rng.standard_normal(shape) / config.embedding_scale
        else:
            numbers = rng.standard_normal(shape) * shape[-1] ** -0.5 * (3.0 if name == "head.weight" else 1.5)
        if router_skew:
            numbers = _skewed(name, numbers, router_skew, rng)
        data = np.ascontiguousarray(numbers, np.float32).view(np.uint8).reshape(-1)
        tensors.append(CheckpointTensor(source_name, shape, TensorKind.F32, data))
    write_safetensors(folder / "model.safetensors", tensors)


def _skewed(name: str, numbers: np.ndarray, skew: float, rng: np.random.Generator) -> np.ndarray:
    """Embeddings share a part along the vector of ones, which routers score by Zipf's law, in a random order of the
    experts; the head does not see it."""
    if name == "embed.weight":
        return numbers + 1.0
    if name == "head.weight":
        numbers = numbers - numbers.mean(axis=1, keepdims=True)
    if name.endswith("router.weight"):
        numbers = numbers - skew / numbers.shape[1] * np.log(1 + rng.permutation(numbers.shape[0]))[:, None]
    return numbers


def write_safetensors(path: Path, tensors: list[CheckpointTensor]) -> None:
    """The plain format: header length, JSON header, the tensors' bytes."""
    header: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.data.size
        header[tensor.name] = {"dtype": tensor.kind.label, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.data.tobytes())


def _byte_characters() -> list[str]:
    """The printable stand-ins for bytes that byte-level tokenizers use (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_tokenizer(folder: Path, vocab_size: int, max_positions: int) -> None:
    specials = [*SPECIAL_TOKENS, *(f"<unused_{i}>" for i in range(256 + len(SPECIAL_TOKENS), vocab_size))]
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + i, "content": text, **flags} for i, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate([*_byte_characters(), *specials])},
            "merges": [],
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
