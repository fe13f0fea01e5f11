"""Reads the files of a Hugging Face tokenizer folder: which tokens have names, which chat templates there are.

Called by `tokenizer.py` alone. It follows transformers 5 in what overrides what, so that a folder means the same here
and there; the tokenizer itself is tokenizer.json, which the `tokenizers` library reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headrace.errors import CheckpointError, ConfigError
from headrace.processing.tokenizer_gguf import TokenizerFiles

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_VOCABULARIES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "merges.txt")


def read_folder(folder: Path) -> TokenizerFiles:
    """tokenizer.json and what goes with it. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in OTHER_VOCABULARIES if (folder / name).is_file()]
        found = f"only {', '.join(others)}, which cannot be read; " if others else ""
        raise CheckpointError(
            f"{folder}: no tokenizer.json: {found}supported are a tokenizer.json (transformers' save_pretrained writes "
            "one) or a GGUF file; --tokenizer can name another folder or file"
        )
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id", _read_json(folder / "config.json").get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise CheckpointError(f"{folder}: eos_token_id is {eos!r}; an integer or a list of integers is allowed")
    return TokenizerFiles(path.read_bytes(), config, tuple(ids))


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, as templates see them; a token may be written as a string or as an object."""
    return {name: text for name in NAMES if (text := _content(config.get(name))) is not None}


def apply_config(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Makes special what tokenizer_config.json says is. Its add_bos_token and add_eos_token do not count, as in
    transformers 5: whether these are added is in the post-processor of tokenizer.json."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = _content(entry)
        if content and content not in known:
            fits = backend.token_to_id(content) == int(token_id) or backend.get_vocab_size() == int(token_id)
            if fits:
                flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
                backend.add_tokens([AddedToken(content, normalized=bool(entry.get("normalized", True)), **flags)])
                known.add(content)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [*special_tokens_of(config).values(), *(_content(token) for token in extra)]
    for text in named:
        # One that the vocabulary lacks would get an id that the model has no row for, so it stays text.
        if text and text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: a file wins over tokenizer_config.json; the one that is used by default is `default`."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in inline if isinstance(entry, dict)}
    legacy = folder / "chat_template.json"
    if legacy.is_file() and isinstance(source := _read_json(legacy).get("chat_template"), str):
        templates["default"] = source
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files["default"] = path
    return templates | {name: _read_text(path) for name, path in files.items()}


def explicit_template(value: str) -> str:
    """What --chat-template gives: a file, or the template itself."""
    if "{" in value or "\n" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise ConfigError(f"--chat-template {value!r}: no such file, and it does not look like a template")
    return _read_text(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the chat template cannot be read: {error}") from None


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return value
