"""How byte-level BPE tokenizers split text before merging, by the name that GGUF files give it (`tokenizer.ggml.pre`).

Called by `tokenizer_gguf.py`. Each entry is a pre-tokenizer of the `tokenizers` library as JSON. The expressions are
those of the models' published tokenizer.json files; which name means which is from llama.cpp (src/llama-vocab.cpp,
MIT).
"""

from __future__ import annotations

from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_SYMBOLS}|{_SPACES}"
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_HAN, _HAN_KANA = "[一-龥ࠀ-一가-퟿]+", "[一-龥぀-ゟ゠-ヿ]+"

_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(*patterns: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]


_STEPS: tuple[tuple[tuple[str, ...], list[dict[str, Any]]], ...] = (
    (("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling", "exaone4"), _split(_GPT2)),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), [_DIGITS, *_split(_GPT2)]),
    (
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx"),
            *("smaug-bpe", "glm4", "chatglm-bpe"),
        ),
        _split(_LLAMA3),
    ),
    (("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _split(_QWEN2)),
    (("qwen35",), _split(_QWEN35)),
    (("tekken",), _split(_TEKKEN)),
    (("gpt-4o", "llama4", "kanana2", "minimax-m2"), _split(_GPT4O)),
    (("deepseek-v3",), _split(r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3)),
    (("deepseek-coder",), [*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN), _DIGITS]),
)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    name: {"type": "Sequence", "pretokenizers": [*steps, BYTE_LEVEL]} for names, steps in _STEPS for name in names
}

WHOLE_WORDS_FIRST = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""A word that is a token is that token, whatever the merges say (`ignore_merges`). Texts begin with BOS by default."""
