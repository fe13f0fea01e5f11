"""Text to token ids and back, with the tokenizer that the model's files carry: a Hugging Face folder or a GGUF file.

Called by the input processor, the output assemblers and the offline `LLM`. Special tokens written in a text count as
those tokens ("<|im_end|>" in a user's message ends it), exactly as in transformers: what a template or a caller
writes and what a user writes are one string by then. Incremental decoding is in `detokenize.py`, templates in
`chat_template.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headrace.errors import CheckpointError, ConfigError, InvalidRequest
from headrace.processing.chat_template import ChatTemplate
from headrace.processing.pieces import Pieces, Scheme
from headrace.processing.tokenizer_files import (
    apply_config,
    explicit_template,
    folder_templates,
    read_folder,
    special_tokens_of,
)
from headrace.processing.tokenizer_gguf import TokenizerFiles, forget_cached, gguf_tokenizer_files

_KEPT_REQUEST_TEMPLATES = 32
_NFC_SHRINKS = 4  # code points at most become one: Unicode Standard Annex 15, on the expansion of NFD


class Tokenizer:
    """One loaded tokenizer. All methods may be called from any thread."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # some tokenizer.json files would cut or pad in silence
        backend.no_padding()
        self.backend = backend
        self.pieces = Pieces(backend)
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        named = backend.token_to_id(self.eos_token) if self.eos_token else None
        self.eos_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*([] if named is None else [named]), *eos_token_ids])
        )
        self.chat_template: ChatTemplate | None = None
        if templates:
            self.chat_template = ChatTemplate.of_named(templates, self.special_tokens)
        self._request_templates: dict[str, ChatTemplate] = {}
        self._lock = threading.Lock()

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self.pieces.special_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. CPU work that grows with the text: call it in a thread when the text may be long.

        It lets other threads run meanwhile: of the library's calls, only those on batches let go of the GIL. Halves of
        surrogate pairs, which JSON can smuggle in, are joined where they match and replaced by U+FFFD where not.
        """
        try:
            encoded = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            encoded = self.backend.encode_batch_fast([whole], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, found without tokenising it; 0 where nothing can be said."""
        return len(text) // self._most_chars if self._most_chars else 0

    @cached_property
    def _most_chars(self) -> int:
        """Most characters of a text that one token can stand for; 0 where there is no such bound."""
        added = self.backend.get_added_tokens_decoder().values()
        if self.pieces.scheme is Scheme.OTHER or any(token.lstrip or token.rstrip for token in added):
            return 0  # a run of unknown characters or of spaces may become one token
        normalizer = self.backend.normalizer
        # One by one and not by get_vocab(), which would hold the GIL for a second.
        lengths = [len(self.backend.id_to_token(token_id) or "") for token_id in range(self.vocab_size)]
        longest = max([*lengths, *(len(token.content) for token in added)])
        return longest * (1 if normalizer is None else _shrinks(json.loads(normalizer.__getstate__())))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that the vocabulary does not have give no text."""
        try:
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise InvalidRequest("token ids must be integers from 0 to 2^32 - 1.", param="tokens") from None
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to a text; they may be part of a character."""
        return self.pieces[token_id].data

    def token_text(self, token_id: int) -> str:
        """The token by itself, a leading space included; bytes that are no whole character show as U+FFFD."""
        piece = self.pieces[token_id]
        return piece.text if piece.text is not None else piece.data.decode("utf-8", "replace")

    def request_template(self, source: str) -> ChatTemplate:
        """A template that came with a request, compiled once. Raises InvalidRequest(param="chat_template")."""
        with self._lock:
            template = self._request_templates.get(source)
        if template is None:
            template = ChatTemplate(source, special_tokens=self.special_tokens)
            with self._lock:
                while len(self._request_templates) >= _KEPT_REQUEST_TEMPLATES:
                    del self._request_templates[next(iter(self._request_templates))]
                self._request_templates[source] = template
        return template


def _shrinks(normalizer: dict[str, Any]) -> int:
    """How many characters a normaliser may turn into one; 0 if there is no bound, or none is known."""
    kind = normalizer["type"]
    if kind == "Sequence":
        factor = 1
        for step in normalizer["normalizers"]:
            factor *= _shrinks(step)
        return factor
    if kind == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return 1 if old is not None and len(new) >= len(old) else 0
    return {"Prepend": 1, "NFD": 1, "NFC": _NFC_SHRINKS}.get(kind, 0)


def load_tokenizer(model_path: Path, tokenizer: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model, or the one that `tokenizer` (a folder or file) names.

    `chat_template` is a file or the template itself, and replaces the model's. Raises CheckpointError or ConfigError.
    """
    path = Path(tokenizer).expanduser() if tokenizer else model_path
    if not path.exists():
        raise CheckpointError(f"tokenizer {str(path)!r}: no such file or folder")
    if path.is_dir() or path.name == "tokenizer.json":
        folder = path if path.is_dir() else path.parent
        files = read_folder(folder)
        backend = _backend(files, str(folder))
        templates = folder_templates(folder, files.config)
    else:
        files = gguf_tokenizer_files(path)
        try:
            backend = _backend(files, str(path))
        except CheckpointError:  # what was kept may be damaged: once more from the file itself
            forget_cached(path)
            files = gguf_tokenizer_files(path)
            backend = _backend(files, str(path))
        templates = {"default": template} if (template := files.config.get("chat_template")) else {}
    if chat_template is not None:
        templates = {"default": explicit_template(chat_template)}
    apply_config(backend, files.config)
    special_tokens = special_tokens_of(files.config)
    try:
        return Tokenizer(backend, special_tokens=special_tokens, eos_token_ids=files.eos_token_ids, templates=templates)
    except InvalidRequest as error:  # a template that does not compile
        if chat_template is not None:
            raise ConfigError(f"--chat-template: {error.message}") from None
        raise CheckpointError(f"{path}: {error.message}") from None


def _backend(files: TokenizerFiles, name: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{name}: the tokenizer cannot be read: {str(error)[:200]}") from None
