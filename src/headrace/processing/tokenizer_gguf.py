"""Builds the tokenizer that a GGUF file describes, as the files of a Hugging Face tokenizer folder.

Called by `tokenizer.py`. A GGUF file lists tokens, scores, merges and types; the `tokenizers` library wants a
tokenizer.json. Two kinds are read: `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE, whose merges follow from
the vocabulary). Since that takes seconds for 262,144 tokens, the result is kept in the cache folder under a name that
hashes the file's metadata.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import CheckpointError
from headrace.processing.pieces import byte_alphabet
from headrace.processing.tokenizer_splits import PRE_TOKENIZERS, WHOLE_WORDS_FIRST
from headrace.weights.gguf import GGUFFile
from headrace.weights.hub import cache_dir

logger = logging.getLogger(__name__)

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
GEMMA_ARCHITECTURES = ("gemma", "gemma2", "gemma3")
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_CONVERSION = 1  # goes up when the same file would now convert differently
_HASHED_BYTES = 16 << 20  # more than any vocabulary known; the tensors follow


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a tokenizer folder holds, read: the bytes of tokenizer.json, tokenizer_config.json, and the EOS ids."""

    tokenizer_json: bytes
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]


def gguf_tokenizer_files(path: Path) -> TokenizerFiles:
    """Converted now, or as converted before. Raises CheckpointError."""
    folder = _cached_folder(path)
    if (files := _read_cached(folder)) is not None:
        return files
    file = GGUFFile(path)
    files = convert(file.metadata, str(path))
    _keep(folder, files)
    return files


def forget_cached(path: Path) -> None:
    """Drops what is kept of this file: it turned out to be unreadable."""
    shutil.rmtree(_cached_folder(path), ignore_errors=True)


# ---- the cache


def _cached_folder(path: Path) -> Path:
    try:
        stat = path.stat()
        with path.open("rb") as file:
            head = file.read(_HASHED_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    key = hashlib.blake2b(head, digest_size=16)
    key.update(f"{_CONVERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    return cache_dir() / "tokenizers" / key.hexdigest()


def _read_cached(folder: Path) -> TokenizerFiles | None:
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
        eos_token_ids = tuple(int(token_id) for token_id in config.pop("eos_token_ids"))
        return TokenizerFiles((folder / "tokenizer.json").read_bytes(), config, eos_token_ids)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


def _keep(folder: Path, files: TokenizerFiles) -> None:
    """Writes a new folder beside, then renames it: another process sees all of it or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            (new / "tokenizer.json").write_bytes(files.tokenizer_json)
            config = {**files.config, "eos_token_ids": list(files.eos_token_ids)}
            (new / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
            shutil.rmtree(folder, ignore_errors=True)  # an unreadable one
            os.rename(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        logger.info("tokenizer not kept in %s (%s); it will be converted again next time", folder, error)


# ---- the conversion


def convert(metadata: Mapping[str, Any], name: str) -> TokenizerFiles:
    """The tokenizer that the metadata describe. `name` is the file, for errors."""
    vocabulary = _Vocabulary(metadata, name)
    if vocabulary.model == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise CheckpointError(
            f"{name}: tokenizer {vocabulary.model!r} is not supported; 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE) are. --tokenizer can name a folder with a tokenizer.json instead"
        )
    tokenizer |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, tokenizer["model"]["vocab"]),
        "post_processor": _post_processor(vocabulary),
    }
    config: dict[str, Any] = dict(vocabulary.named)
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = str(template)
    ids = (vocabulary.number(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    eos_token_ids = tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return TokenizerFiles(msgspec.json.encode(tokenizer), config, eos_token_ids)


class _Vocabulary:
    """The tokenizer part of the metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self._metadata, self.name = metadata, name
        self.architecture = metadata.get("general.architecture")
        self.model = self.get("model")
        self.tokens: Sequence[str] = self.get("tokens") or ()
        if self.model is None or not self.tokens:
            raise CheckpointError(f"{name}: the file holds no tokenizer; name one with --tokenizer")
        types = self.get("token_type")
        self.types: Sequence[int] = [1] * len(self.tokens) if types is None else [int(kind) for kind in types]
        if len(self.types) != len(self.tokens):
            raise CheckpointError(f"{name}: {len(self.tokens)} tokens but {len(self.types)} token types")
        self.named = {
            name: self.tokens[token_id]
            for name, key in NAMED_TOKENS.items()
            if (token_id := self.number(key)) is not None
        }

    def get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def number(self, key: str) -> int | None:
        """A token id, checked against the vocabulary."""
        value = self.get(key)
        if value is None:
            return None
        if not 0 <= int(value) < len(self.tokens):
            raise CheckpointError(f"{self.name}: {key} is {value}, the vocabulary has {len(self.tokens)} tokens")
        return int(value)

    def merges(self) -> list[tuple[str, str]] | None:
        listed = self.get("merges")
        if listed is None:
            return None
        pairs = []
        for merge in listed:
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise CheckpointError(f"{self.name}: merge {merge[:80]!r} is not two tokens with a space between")
            pairs.append((left, right))
        return pairs


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    split = vocabulary.get("pre") or "default"
    if split not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{vocabulary.name}: pre-tokenizer {split!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}. "
            "--tokenizer can name a folder with a tokenizer.json instead"
        )
    merges = vocabulary.merges()
    if merges is None:
        raise CheckpointError(f"{vocabulary.name}: a byte-level tokenizer without merges")
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    alphabet = set(spelling.values())
    vocab = {}
    for token_id, token in enumerate(vocabulary.tokens):
        if vocabulary.types[token_id] not in (CONTROL, USER_DEFINED) and not alphabet.issuperset(token):
            token = "".join(spelling[byte] for byte in token.encode())
        vocab[token] = token_id
    return {
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[split],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=split in WHOLE_WORDS_FIRST),
    }


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    tokens: Sequence[str] = vocabulary.tokens
    is_gemma = vocabulary.architecture in GEMMA_ARCHITECTURES
    if is_gemma:
        # Runs of spaces are written as spaces in the file, while the normalizer writes a space as the low line.
        tokens = ["▁" * len(token) if token.isspace() and token.strip(" ") == "" else token for token in tokens]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = vocabulary.merges()
    if merges is None:
        scores = vocabulary.get("scores")
        if scores is None or len(scores) != len(tokens):
            raise CheckpointError(f"{vocabulary.name}: a SentencePiece tokenizer needs one score per token")
        # Gemma's scores do not follow the order in which its merges apply; the order of its vocabulary does.
        merges = merges_of(vocab, range(0, -len(tokens), -1) if is_gemma else [float(score) for score in scores])
    has_prefix = not is_gemma and vocabulary.get("add_space_prefix") is not False
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    prefix = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, unk_token=vocabulary.named.get("unk_token"), byte_fallback=True, fuse_unk=True),
    }


def merges_of(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every way to cut a token into two tokens, best token first.

    The order is that of transformers' `generate_merges`: by score, then by the length of the left part, longest first.
    """
    ways: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        score, length = scores[token_id], len(token)
        for cut in range(1, length):
            left = token[:cut]
            if left in vocab and (right := token[cut:]) in vocab:
                ways.append((-score, -cut, cut - length, left, right))
    ways.sort(key=lambda way: way[:3])
    return [(left, right) for *_, left, right in ways]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**defaults, **options, "vocab": vocab, "merges": merges}


def _added_tokens(vocabulary: _Vocabulary, vocab: Mapping[str, int]) -> list[dict[str, Any]]:
    """Control tokens and the named ones are special; user-defined ones are matched whole, but are text."""
    named = set(vocabulary.named.values())
    added = []
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_special = kind == CONTROL or token in named
        if (is_special or kind == USER_DEFINED) and token and vocab.get(token) == token_id:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": token_id, "content": token, **flags, "special": is_special})
    return added


def _post_processor(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    starts = vocabulary.model == "llama" or vocabulary.get("pre") in WHOLE_WORDS_FIRST  # older files have no flag
    flags = (("bos_token", "add_bos_token", starts), ("eos_token", "add_eos_token", False))
    wanted: dict[str, str] = {}
    for name, flag, default in flags:
        value = vocabulary.get(flag)
        if (default if value is None else bool(value)) and name in vocabulary.named:
            wanted[name] = vocabulary.named[name]
    return template_processing(
        wanted.get("bos_token"),
        wanted.get("eos_token"),
        {token: vocabulary.number(NAMED_TOKENS[name]) or 0 for name, token in wanted.items()},
    )


def template_processing(bos: str | None, eos: str | None, ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor that puts these tokens around a text."""
    if bos is None and eos is None:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts = [("SpecialToken", bos), ("Sequence", sequence), ("SpecialToken", eos)]
        return [{kind: {"id": token, "type_id": type_id}} for kind, token in parts if token is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (bos, eos) if token
        },
    }
