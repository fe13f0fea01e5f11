"""Hands a model's tokenizer to the grammars (grammar/): a front end's own, or read anew in the engine process."""

from __future__ import annotations

from pathlib import Path

from headrace.grammar import Vocabulary
from headrace.processing.tokenizer import Tokenizer, load_tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Looks at every token: CPU work."""
    return Vocabulary(
        pieces=[tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_token_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def load_vocabulary(model_path: Path, tokenizer: str | None = None) -> Vocabulary:
    """Of the model that lies at `model_path`, or of another tokenizer's file or folder."""
    return vocabulary_of(load_tokenizer(model_path, tokenizer))
