"""The mock engine's tokenizer: every byte is a token, and the usual chat template. Needs no file.

Used by front ends of `headrace serve --mock-engine` and by tests. Token ids 0 to 255 are the bytes.
"""

from __future__ import annotations

from typing import Final

import tokenizers

from headrace.processing.pieces import byte_alphabet
from headrace.processing.tokenizer import Tokenizer

_SPECIAL: Final = {"bos_token": "<bos>", "eos_token": "<eos>"}
_ADDED: Final = (*_SPECIAL.values(), "<|im_start|>", "<|im_end|>")  # token ids 256 to 259
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    vocabulary = byte_alphabet()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in _ADDED])
    return Tokenizer(backend, special_tokens=_SPECIAL, templates={"default": _CHAT_TEMPLATE})
