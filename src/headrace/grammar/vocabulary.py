"""The bytes of each token, in the form that llguidance reads. `compiler.py` builds one per process.

Who knows the tokenizer fills in a `Vocabulary` (processing/vocabulary.py); nothing here reads files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

_SENTINEL = "\x02"
"""Put before a text, it keeps tokenizers from adding a space of their own there."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, as far as grammars need it."""

    pieces: Sequence[bytes]  # what each token id adds to a text
    special_ids: Collection[int]  # tokens that are no text
    encode: Callable[[str], list[int]]  # without special tokens of its own


def build_tokenizer(vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """`vocab_size` is the model's, which may have more rows than the tokenizer has tokens, or fewer. Costs about a
    second for 262,144 tokens."""
    assert eos_token_ids, "a grammar ends with an EOS token"
    pieces = [bytes(piece) for piece in vocabulary.pieces[:vocab_size]]
    pieces += [b""] * (vocab_size - len(pieces))
    return LLTokenizer(TokenizerWrapper(_Source(vocabulary, pieces, eos_token_ids[0])), eos_token=list(eos_token_ids))


class _Source:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, pieces: list[bytes], eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = pieces
        self.special_token_ids = sorted(i for i in vocabulary.special_ids if i < len(pieces))
        self._encode = vocabulary.encode
        self._special = frozenset(self.special_token_ids)
        self._ids: dict[bytes, int] = {}
        self._longest = 0

    def __call__(self, text: str) -> list[int]:
        """The tokens that the model is used to for a text which the grammar leaves no choice about."""
        if not isinstance(text, str):  # llguidance tries whether bytes will do
            raise TypeError("text is wanted")
        data = text.encode()
        ids = self._encode(text)
        if self._spells(ids, data):
            return ids
        first = self._encode(_SENTINEL)
        ids = self._encode(_SENTINEL + text)
        if ids[: len(first)] == first and self._spells(ids[len(first) :], data):
            return ids[len(first) :]
        return self._greedy(data)

    def _spells(self, ids: list[int], data: bytes) -> bool:
        size = len(self.tokens)
        is_text = all(i < size and i not in self._special for i in ids)
        return is_text and b"".join(self.tokens[i] for i in ids) == data

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token each time; where the tokenizer's own way gives other bytes."""
        if not self._ids:
            self._ids = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in self._special}
            self._longest = max(map(len, self._ids), default=1)
        ids: list[int] = []
        while data:
            lengths = range(min(self._longest, len(data)), 0, -1)
            found = next((n for n in lengths if data[:n] in self._ids), None)
            if found is None:
                break
            ids.append(self._ids[data[:found]])
            data = data[found:]
        return ids
