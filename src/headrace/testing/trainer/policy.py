"""The model that is trained: transformers' Llama in float32, the log probabilities it gives, one step of its gradient.

It reads the same folder or GGUF file as the server. The step is GRPO's: a sample's advantage is its reward beside those
of its own prompt, and the clipped ratio to the server's log probabilities weights it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.config import DecoderConfig
from headrace.models.names.hf import LLAMA
from headrace.models.plan import match_tensors
from headrace.models.registry import find_family
from headrace.testing.trainer.rollouts import Group
from headrace.weights.checkpoint import open_checkpoint

CLIP = 0.2
_EPSILON = 1e-6

Arrays = Mapping[str, np.ndarray]
"""Tensors by transformers' names, as they are sent: float32, or uint16 for the bits of bfloat16."""


class Policy:
    """A Llama and its AdamW. `trained` is a part of the names of the tensors that learn; the others stay.

    torch gets `num_threads` in the whole process: one is the fastest for a tiny model beside a server that computes.
    """

    def __init__(self, path: Path, *, learning_rate: float = 1e-2, trained: str = "", num_threads: int = 1) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(num_threads)
        self.model: Any = _from_gguf(path) if path.is_file() else _from_folder(path)
        self.model.eval()  # it has no dropout; this is for models that do
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trained in name)
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Without decay, rows that no gradient has met keep their bits.
        self._optimizer: Any = self._torch.optim.AdamW(learning, lr=learning_rate, weight_decay=0.0)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log probability of every token but the first."""
        with self._torch.no_grad():
            values: list[float] = self._scores([token_ids])[0].tolist()
        return values

    def step(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> float:
        """One update; `rewards` has a number per sample. Returns the drift: how far the server's log probabilities were
        from this model's, at most."""
        self._optimizer.zero_grad()
        drift = 0.0
        for group, values in zip(groups, rewards, strict=True):
            theirs = self._torch.tensor([sample.logprobs for sample in group.samples])
            sequences = [group.prompt_ids + sample.token_ids for sample in group.samples]
            change = self._scores(sequences)[:, len(group.prompt_ids) - 1 :] - theirs
            drift = max(drift, float(change.detach().abs().max()))
            reward = self._torch.tensor(list(values))
            advantage = ((reward - reward.mean()) / (reward.std() + _EPSILON))[:, None]
            ratio = change.exp()
            gain = self._torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (-gain.mean() / len(groups)).backward()
        self._optimizer.step()
        return drift

    def weights(self, dtype: str = "float32") -> dict[str, np.ndarray]:
        """Copies of all tensors; a head that is tied to the embedding is left out."""
        torch = self._torch
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        if dtype == "bfloat16":
            return {name: t.to(torch.bfloat16).view(torch.uint16).numpy().copy() for name, t in tensors.items()}
        return {name: t.numpy().copy() for name, t in tensors.items()}

    def _scores(self, sequences: Sequence[Sequence[int]]) -> Any:
        """[sequences, tokens - 1]; all of one length."""
        ids = self._torch.tensor(sequences)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def _from_folder(path: Path) -> Any:
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch: Any = importlib.import_module("torch")
    return transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)


def _from_gguf(path: Path) -> Any:
    """transformers' own reader of these files spends a minute on the vocabulary and wants one more package."""
    transformers: Any = importlib.import_module("transformers")
    torch: Any = importlib.import_module("torch")
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint)
    config = family.make_config(checkpoint)
    if config.architecture != "llama":
        raise ValueError(f"{path}: {config.architecture} is not trained here, llama is")
    tensors = {
        LLAMA.source_name(name): torch.from_numpy(_rows(name, tensor.dequantize(), config))
        for name, tensor in match_tensors(checkpoint, config, family.names).items()
    }
    with importlib.import_module("transformers.initialization").no_init_weights():
        model = transformers.LlamaForCausalLM(_config(transformers, config))
    result = model.load_state_dict(tensors, strict=False)
    if result.unexpected_keys or not set(result.missing_keys) <= {"lm_head.weight"}:
        raise ValueError(f"{path}: tensors do not match: {result}")
    model.tie_weights()
    return model


def _config(transformers: Any, config: DecoderConfig) -> Any:
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.has_tied_head,
    )


def _rows(name: str, values: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """llama.cpp puts the rows that rotate together side by side in Q and K; transformers keeps them half a head apart.

    per head   0 h+0 1 h+1 ... h-1 2h-1   ->   0 1 ... h-1 | h h+1 ... 2h-1
    """
    num_heads = {"q.weight": config.num_heads, "k.weight": config.num_kv_heads}.get(".".join(name.split(".")[-2:]))
    if num_heads is None:
        return values
    pairs = values.reshape(num_heads, config.head_dim // 2, 2, values.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
