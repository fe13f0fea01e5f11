"""What each token id stands for: its exact bytes, and its text where the bytes are whole characters.

Called by `tokenizer.py` (token text and bytes for logprobs) and by `detokenize.py` on the path of every token.
Entries are made when first asked for and kept, so start-up pays nothing for a vocabulary of 262,144. Which of three
schemes a tokenizer follows is read from its decoder: byte-level BPE, SentencePiece with byte fallback, or any other
(which `detokenize.py` serves by decoding windows of ids).
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

import tokenizers


class Scheme(Enum):
    """How the texts of tokens join."""

    BYTE_LEVEL = "byte_level"  # bytes are joined, then read as UTF-8
    BYTE_FALLBACK = "byte_fallback"  # texts are joined; each run of <0xNN> tokens is read as UTF-8 by itself
    OTHER = "other"


class Piece(NamedTuple):
    """One token. `text` is None where the bytes alone are no whole characters."""

    data: bytes
    text: str | None
    is_special: bool
    is_byte: bool  # a <0xNN> token of the byte-fallback scheme


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level BPE writes bytes as, from GPT-2's encoder.py: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Pieces(dict[int, Piece]):
    """The table of one tokenizer. Safe to read from several threads: an entry is computed at worst twice.

    A dictionary that fills itself, because it is read once per token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._alphabet = byte_alphabet()
        self._replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.scheme = self._read_decoder()

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._make(token_id)
        return piece

    def _read_decoder(self) -> Scheme:
        if self._backend.decoder is None:
            return Scheme.OTHER
        steps = _flatten(json.loads(self._backend.decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return Scheme.BYTE_LEVEL
        if kinds[-1:] == ["Strip"] and (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) == (" ", 1, 0):
            self.strips_first_space = True
            kinds.pop()
        is_plain = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
        if kinds == ["Replace", "ByteFallback", "Fuse"] and is_plain:
            self._replacements = [(steps[0]["pattern"]["String"], steps[0]["content"])]
            return Scheme.BYTE_FALLBACK
        return Scheme.OTHER

    def _make(self, token_id: int) -> Piece:
        token = self._token(token_id)
        is_special = token_id in self.special_token_ids
        if self.scheme is Scheme.BYTE_LEVEL:
            data = self._byte_level(token)
            return Piece(data, _text(data), is_special, False)
        if self.scheme is Scheme.BYTE_FALLBACK:
            for old, new in self._replacements:
                token = token.replace(old, new)
            if (byte := _fallback_byte(token)) is not None:
                return Piece(bytes([byte]), None, is_special, True)
            return Piece(token.encode(), token, is_special, False)
        text = self._in_context(token_id) if token else ""
        return Piece(text.encode(), text, is_special, False)

    def _token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that it does not have (padded vocabularies)."""
        try:
            return self._backend.id_to_token(token_id) or ""
        except OverflowError:
            return ""

    def _byte_level(self, token: str) -> bytes:
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token that is spelled as it is, not in the alphabet
            return token.encode()

    def _in_context(self, token_id: int) -> str:
        """The text that the token adds to a text before it, so that a leading space shows."""
        decode = self._backend.decode
        once, twice = (decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :] if twice.startswith(once) else once


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
