"""SmolLM2 and Gemma 3 from their GGUF files choose the same greedy tokens as transformers on the same files.

Our model generates; transformers then reads each prompt with our output behind it, and its own greedy choice at every
position must be the token that stands there, so by induction it would have generated the same. It reads a copy of the
file that keeps every weight byte but leaves out the vocabulary, because it spends a minute on decoding that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.kernels import create_backend
from headrace.models import load_model
from headrace.processing.tokenizer import Tokenizer, load_tokenizer
from headrace.testing.steps import Runner
from headrace.weights.gguf import GGUFFile
from headrace.weights.hub import cached_alias_path
from headrace.weights.tensor import TensorKind

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(180)]

NUM_TOKENS = 48
PROMPTS = (
    "The capital of France is",
    "The three primary colours are",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Les mathématiques sont",
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Write a haiku about rain.",
    "What is 12 plus 30?",
    "Explain gravity to a child in one sentence.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that reverses a string.",
)


def copy_without_vocabulary(source: GGUFFile, target: Path) -> None:
    """All tensors as they are, and the keys that describe the model."""
    writer = gguf.GGUFWriter(target, source.architecture)
    prefix = f"{source.architecture}."
    for key, value in source.metadata.items():
        if key.startswith(prefix) and isinstance(value, int):
            writer.add_uint32(key, value)
        elif key.startswith(prefix):
            writer.add_float32(key, value)
    if f"{prefix}vocab_size" not in source.metadata:
        writer.add_vocab_size(source.tensors["token_embd.weight"].shape[0])
    for name, tensor in source.tensors.items():
        if tensor.kind is TensorKind.F32:
            writer.add_tensor(name, tensor.data.view(np.float32).reshape(tensor.shape))
        else:
            rows = tensor.data.reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[tensor.kind.label])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_in_transformers(path: Path) -> Any:
    """What `from_pretrained(gguf_file=...)` does, without its wish for one more package."""
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def greedy(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    """NUM_TOKENS per prompt, past any EOS, all prompts in one batch."""
    outputs: list[list[int]] = [[] for _ in prompts]
    chunks = dict(enumerate(prompts))
    for _ in range(NUM_TOKENS):
        for i, logits in runner.step(chunks).items():
            outputs[i].append(int(logits[-1].argmax()))
        chunks = {i: output[-1:] for i, output in enumerate(outputs)}
    return outputs


def choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """The model's own greedy choice at each position of the output."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False, logits_to_keep=len(output)).logits
    return logits[0].argmax(dim=-1).tolist()


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    if tokenizer.chat_template is not None:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            text = tokenizer.chat_template.render(messages, add_generation_prompt=True)
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


@pytest.mark.parametrize(("alias", "num_prompts"), [("smollm2", 16), ("gemma3-270m", 8)])
def test_greedy_tokens_equal_transformers(alias: str, num_prompts: int, tmp_path: Path) -> None:
    path = cached_alias_path(alias)
    if path is None:
        pytest.skip(f"{alias} is not in the cache")
    prompts = make_prompts(load_tokenizer(path))
    assert len(prompts) == num_prompts
    backend = create_backend("reference")
    outputs = greedy(Runner(load_model(path, backend), backend, num_blocks=1024), prompts)

    copy_without_vocabulary(GGUFFile(path), tmp_path / "model.gguf")
    model = load_in_transformers(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").unlink()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert choices(model, prompt, output) == output, prompt
