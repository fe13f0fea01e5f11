"""Turns token ids into text as they come: the text of all pushes and the flush is that of decoding all at once.

Called by the output assemblers for every token, so the usual token costs one look-up. It never emits text of the
prompt nor part of a character: bytes of an unfinished one wait, and show as U+FFFD only once nothing can complete
them. Stop strings are `stop.py`'s.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Protocol

import tokenizers

from headrace.processing.pieces import Pieces, Scheme
from headrace.processing.tokenizer import Tokenizer

REPLACEMENT = "�"
MAX_RUN_BYTES = 64
"""A run of byte-fallback tokens is all one text or all U+FFFD, so it waits for its end; but not for more than this."""
MAX_WINDOW_TOKENS = 16


class _Decoder(Protocol):
    """One way to join tokens. `offset`: see `IncrementalDetokenizer.offset`."""

    offset: int

    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The text of one choice. `step` takes one token, `push` any number."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: Set[int] = frozenset(),
    ) -> None:
        """`shown_token_ids`: special tokens whose text comes out even when special tokens are skipped."""
        pieces = tokenizer.pieces
        hidden = pieces.special_token_ids - shown_token_ids if skip_special_tokens and shown_token_ids else None
        skip = skip_special_tokens and hidden is None
        if pieces.scheme is Scheme.BYTE_LEVEL:
            self._decoder: _Decoder = _ByteLevel(pieces, prompt_token_ids, skip)
        elif pieces.scheme is Scheme.BYTE_FALLBACK:
            self._decoder = _ByteFallback(pieces, prompt_token_ids, skip)
        else:
            self._decoder = _Windows(tokenizer.backend, prompt_token_ids, skip)
        if hidden is not None:
            self._decoder = _Hiding(self._decoder, hidden)
        self.step: Callable[[int], str] = self._decoder.step
        self.flush: Callable[[], str] = self._decoder.flush

    @property
    def offset(self) -> int:
        """Where the text of the last step's token begins, counted from the end of what had come out before it.

        Not 0 where text of tokens before it was held back: it comes out first.
        """
        return self._decoder.offset

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now."""
        step = self.step
        if len(token_ids) == 1:
            return step(token_ids[0])
        return "".join(map(step, token_ids))


class _Hiding:
    """Another decoder, which shows special tokens, without some tokens."""

    def __init__(self, decoder: _Decoder, hidden: Set[int]) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self.offset = 0
        self.flush = decoder.flush

    def step(self, token_id: int) -> str:
        self.offset = 0
        if token_id in self._hidden:
            return ""
        text = self._decoder.step(token_id)
        self.offset = self._decoder.offset
        return text


class _ByteLevel:
    """Bytes of all tokens in a row, read as UTF-8.

    prompt ... E2 82 | AC 41 ...      `_pending` begins as the prompt's unfinished bytes. If the first byte of
               ^^^^^ _borrowed        the output continues them, the character is the output's; else they are dropped.
    """

    def __init__(self, pieces: Pieces, prompt: Sequence[int], skip_special: bool) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._pending = _unfinished(_tail_bytes(pieces, prompt, skip_special))
        self._borrowed = bool(self._pending)  # nothing of what is pending is the output's
        self.offset = 0

    def step(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        self.offset = 0
        if piece.is_special and self._skip_special:
            return ""
        if piece.text is not None and not self._pending:
            return piece.text
        return self._join(piece.data)

    def _join(self, data: bytes) -> str:
        late = ""
        if self._pending and data:
            if _continues(self._pending, data[0]):
                data = self._pending + data
            elif not self._borrowed:
                late = REPLACEMENT
            self._borrowed = False
        elif self._pending:
            return ""
        text, self._pending = _whole_characters(data)
        self.offset = len(late)
        return late + text

    def flush(self) -> str:
        text = REPLACEMENT if self._pending and not self._borrowed else ""
        self._pending = b""
        return text


class _ByteFallback:
    """Texts in a row, and between them runs of byte tokens, each run read as UTF-8 by itself, all or nothing."""

    def __init__(self, pieces: Pieces, prompt: Sequence[int], skip_special: bool) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._run = _unfinished(_byte_run(pieces, prompt, skip_special))
        self._num_borrowed = len(self._run)
        self._num_run_chars = 0  # whole characters in the run
        self._is_broken = False  # the run cannot be text any more: each byte of it is a U+FFFD
        self._at_start = pieces.strips_first_space and not _has_text(pieces, prompt, skip_special)
        self.offset = 0

    def step(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        self.offset = 0
        if piece.is_special and self._skip_special:
            return ""
        if piece.is_byte:
            return self._started(self._byte(piece.data))
        if not piece.data:  # an id without a token
            return ""
        if not self._run and not self._at_start:
            self._is_broken = False
            return piece.text or ""
        late = self._end_run()
        self.offset = len(late)
        return self._started(late + (piece.text or ""))

    def _byte(self, byte: bytes) -> str:
        if self._is_broken:
            return REPLACEMENT
        if self._num_borrowed == len(self._run) and self._run and not _continues(self._run, byte[0]):
            self._run, self._num_borrowed = b"", 0
        run, self.offset = self._run + byte, self._num_run_chars
        text, rest = _whole_characters(run)
        if REPLACEMENT in text and not _is_valid(run):
            num_lost = len(run) - self._num_borrowed
            self._clear_run()
            self._is_broken = True
            self.offset = num_lost - 1
            return REPLACEMENT * num_lost
        self._run, self._num_run_chars = run, len(text)
        if len(run) < MAX_RUN_BYTES:
            return ""
        self._clear_run(rest)
        return text

    def _clear_run(self, rest: bytes = b"") -> None:
        self._run, self._num_borrowed, self._num_run_chars, self._is_broken = rest, 0, 0, False

    def _end_run(self) -> str:
        run, num_own = self._run, len(self._run) - self._num_borrowed
        self._clear_run()
        if not num_own:
            return ""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * num_own

    def _started(self, text: str) -> str:
        """Drops the space before the first word of a text that begins here."""
        if self._at_start and text:
            self._at_start = False
            if text[0] == " ":
                self.offset = max(self.offset - 1, 0)
                return text[1:]
        return text

    def flush(self) -> str:
        return self._started(self._end_run())


class _Windows:
    """Any other decoder of the library: decodes a short window of ids with and without the new ones.

    The method is that of text-generation-inference. The window moves on whenever its text is complete, so a token costs
    a decode of few ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, prompt: Sequence[int], skip_special: bool) -> None:
        self._backend = backend
        self._skip_special = skip_special
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._ids: list[int] = []
        for token_id in reversed(prompt):  # the last tokens that show
            if not (skip_special and token_id in self._special):
                self._ids.append(token_id)
            if len(self._ids) == 6:
                break
        self._ids.reverse()
        self._num_read = len(self._ids)
        self.offset = 0

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip_special)
        return text

    def step(self, token_id: int) -> str:
        self.offset = 0
        if self._skip_special and token_id in self._special:
            return ""
        self._ids.append(token_id)
        num_new = len(self._ids) - self._num_read
        before, after = self._decode(self._ids[: self._num_read]), self._decode(self._ids)
        if after.endswith(REPLACEMENT) and num_new < MAX_WINDOW_TOKENS:
            return ""
        return self._advance(before, after)

    def _advance(self, before: str, after: str) -> str:
        text = after[len(before) :] if len(after) > len(before) else ""
        self._ids = self._ids[self._num_read :] or self._ids
        self._num_read = len(self._ids)
        return text

    def flush(self) -> str:
        if len(self._ids) == self._num_read:
            return ""
        return self._advance(self._decode(self._ids[: self._num_read]), self._decode(self._ids))


def _visible(pieces: Pieces, prompt: Sequence[int], skip_special: bool) -> Iterator[int]:
    """The prompt's tokens from its end, without those that are skipped."""
    return (token_id for token_id in reversed(prompt) if not (skip_special and pieces[token_id].is_special))


def _tail_bytes(pieces: Pieces, prompt: Sequence[int], skip_special: bool) -> bytes:
    """The last few bytes of the prompt: enough to see whether its last character is whole."""
    tail = b""
    for token_id in _visible(pieces, prompt, skip_special):
        tail = pieces[token_id].data + tail
        if len(tail) >= 4:
            break
    return tail


def _byte_run(pieces: Pieces, prompt: Sequence[int], skip_special: bool) -> bytes:
    """The last few bytes of the byte tokens that end the prompt."""
    run = b""
    for token_id in _visible(pieces, prompt, skip_special):
        if not pieces[token_id].is_byte or len(run) >= 4:
            break
        run = pieces[token_id].data + run
    return run


def _has_text(pieces: Pieces, prompt: Sequence[int], skip_special: bool) -> bool:
    return any(pieces[i].data for i in prompt if not (skip_special and pieces[i].is_special))


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end that begin a character and do not end it."""
    return _whole_characters(data)[1]


def _continues(unfinished: bytes, byte: int) -> bool:
    """Whether the byte is a valid next one of an unfinished character."""
    return _is_valid(unfinished + bytes([byte]))


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """The text of all bytes but an unfinished character at the end, which is returned as it is."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    rest = data[used:]
    if _is_surrogate(rest):
        return text + REPLACEMENT * 2, b""
    return text, rest


def _is_valid(data: bytes) -> bool:
    """Whether the bytes are UTF-8, perhaps with an unfinished character at the end."""
    try:
        used = codecs.utf_8_decode(data, "strict", False)[1]
    except UnicodeDecodeError:
        return False
    return not _is_surrogate(data[used:])


def _is_surrogate(rest: bytes) -> bool:
    """Python waits for the third byte of an encoded surrogate, though no byte can make a character of the first two."""
    return len(rest) == 2 and rest[0] == 0xED and rest[1] >= 0xA0
