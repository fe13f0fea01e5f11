"""Small tokenizers of each kind, built from metadata as a GGUF file carries it."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from headrace.processing.pieces import byte_alphabet
from headrace.processing.tokenizer import Tokenizer
from headrace.processing.tokenizer_gguf import convert

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def build(metadata: dict[str, Any]) -> Tokenizer:
    files = convert({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "test.gguf")
    special = {name: value for name, value in files.config.items() if name.endswith("_token")}
    backend = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    return Tokenizer(backend, special_tokens=special, eos_token_ids=files.eos_token_ids)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """256 bytes, some merges (words, and pairs of bytes that are no character), special tokens, an added token."""
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
    merges += [(spelling[0xE4], spelling[0xBD]), (spelling[0xF0], spelling[0x9F]), ("a", spelling[0xC3])]
    tokens = [spelling[byte] for byte in range(256)] + [left + right for left, right in merges]
    types = [NORMAL] * len(tokens)
    tokens += ["<|end|>", "<|begin|>", "<think>"]
    types += [CONTROL, CONTROL, USER_DEFINED]
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in merges],
        "eos_token_id": tokens.index("<|end|>"),
        "bos_token_id": tokens.index("<|begin|>"),
    }
    return build(metadata)


def sentencepiece_metadata(*, add_space_prefix: bool) -> dict[str, Any]:
    words = ["▁", "▁hello", "▁he", "llo", "he", "ll", "o", "h", "e", "l", "▁w", "w", "r", "d", "é", "你", "a", "b"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<think>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(words) + 1)],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": add_space_prefix,
    }


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece with byte fallback, as Gemma: no space before the first word."""
    return build(sentencepiece_metadata(add_space_prefix=False))


@pytest.fixture(scope="session")
def byte_fallback_prefix() -> Tokenizer:
    """SentencePiece with byte fallback, as Llama 2: a space before the first word, dropped when decoding."""
    return build(sentencepiece_metadata(add_space_prefix=True))


@pytest.fixture(params=["byte_level", "byte_fallback", "byte_fallback_prefix"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = request.getfixturevalue(request.param)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer
