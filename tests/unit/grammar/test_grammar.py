"""Compiling grammars and following them, on a vocabulary of bytes and a few longer tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.grammar import GrammarCompiler, GrammarError, Matcher, Vocabulary
from headrace.types import GrammarSpec

EOS, SECOND_EOS, SPECIAL = 256, 257, 258
LONGER = [b"true", b'{"', b'"a"', "ü".encode(), b"  "]
PIECES = [bytes([n]) for n in range(256)] + [b"<eos>", b"<end>", b"<tool>"] + LONGER
VOCAB_SIZE = len(PIECES) + 9  # the model's head has more rows than the tokenizer has tokens


def encode(text: str) -> list[int]:
    return list(text.encode())


def make(
    pieces: Sequence[bytes] = PIECES, eos: Sequence[int] = (EOS, SECOND_EOS), num_kept: int = 128
) -> GrammarCompiler:
    return GrammarCompiler(
        lambda: Vocabulary(pieces, frozenset({EOS, SECOND_EOS, SPECIAL}), encode), VOCAB_SIZE, eos, num_kept=num_kept
    )


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make()


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    assert mask is not None
    assert mask.shape == (VOCAB_SIZE,)
    assert mask.dtype == np.float32
    assert set(np.unique(mask)) <= {0.0, -np.inf}
    return np.flatnonzero(mask == 0).tolist()


def test_only_what_may_follow_is_allowed(compiler: GrammarCompiler) -> None:
    matcher = compiler.get(regex("(ab|true)c?")).matcher()
    assert allowed(matcher) == [ord("a"), ord("t"), PIECES.index(b"true")]
    matcher.accept(PIECES.index(b"true"))
    assert allowed(matcher) == [ord("c"), EOS, SECOND_EOS]
    assert not matcher.is_complete
    matcher.accept(ord("c"))
    assert allowed(matcher) == [EOS, SECOND_EOS], "complete: nothing but the end"
    assert matcher.is_complete
    matcher.accept(SECOND_EOS)
    assert matcher.error is None


def test_special_tokens_are_no_text_and_rows_without_a_token_never_come(compiler: GrammarCompiler) -> None:
    assert allowed(compiler.get(regex("(?s:.)*")).matcher())[-1] < len(PIECES)
    assert SPECIAL not in allowed(compiler.get(regex("(?s:.)+")).matcher())
    matcher = compiler.get(GrammarSpec("lark", f"start: <[{SPECIAL}]>")).matcher()
    assert allowed(matcher) == [SPECIAL]


def test_a_matcher_that_begins_amid_an_output_is_like_one_that_was_there(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}}))
    output = [PIECES.index(b'{"'), ord("a"), ord('"'), ord(" "), ord(":"), PIECES.index(b"true"), ord("}")]
    followed = compiler.get(spec).matcher()
    for cut, token_id in enumerate(output):
        fresh = make().get(spec).matcher(output[:cut])
        assert allowed(fresh) == allowed(followed)
        followed.accept(token_id)
    assert allowed(followed) == allowed(compiler.get(spec).matcher(output))


def test_a_refused_token_is_an_error_that_stays(compiler: GrammarCompiler) -> None:
    matcher = compiler.get(regex("abc")).matcher()
    matcher.accept(ord("x"))
    assert matcher.error
    assert "\n" not in matcher.error
    assert matcher.mask() is None
    matcher.accept(ord("a"))
    assert matcher.mask() is None
    assert compiler.get(regex("abc")).matcher([ord("x")]).error, "others of the grammar are not touched"
    assert compiler.get(regex("abc")).matcher([ord("a")]).error is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-ahead"),
        (GrammarSpec("lark", "start: nowhere"), "nowhere"),
        (GrammarSpec("lark", 'begin: "a"'), "start"),
        (GrammarSpec("lark", "start: start"), "no text"),
        (GrammarSpec("json_schema", '{"type": "objct"}'), "objct"),
        (GrammarSpec("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (GrammarSpec("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'), "not"),
        (GrammarSpec("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (GrammarSpec("json_schema", "[]"), "object"),
        (GrammarSpec("json_schema", "{"), "EOF"),
        (GrammarSpec("gbnf", "root ::= a"), "gbnf"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_cannot_be_followed(compiler: GrammarCompiler, spec: GrammarSpec, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        compiler.get(spec)


def test_a_model_without_an_end_token_follows_none() -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        make(eos=()).get(regex("a"))


def test_the_vocabulary_is_read_once_and_a_grammar_compiled_once() -> None:
    num_loads, num_prepared = [], []
    lock = threading.Lock()

    def load() -> Vocabulary:
        num_loads.append(1)
        return Vocabulary(PIECES, frozenset({EOS}), encode)

    def prepare(spec: GrammarSpec) -> GrammarSpec:
        with lock:
            num_prepared.append(spec)
        return spec

    compiler = GrammarCompiler(load, VOCAB_SIZE, [EOS], num_kept=2, prepare=prepare)
    futures = [compiler.compile(regex("a")) for _ in range(5)]
    assert len({id(future.result()) for future in futures}) == 1
    kept = compiler.get(regex("b"))
    for text in ("c", "d"):
        compiler.get(regex(text))
    assert compiler.get(regex("b")) is kept, "what somebody holds is not compiled again"
    del futures
    assert len(num_loads) == 1
    assert num_prepared == [regex(text) for text in "abcd"]
    compiler.get(regex("a"))
    assert len(num_prepared) == 5, "the oldest ones go"
    compiler.close()


def test_forced_text_comes_in_the_tokenizer_s_own_tokens() -> None:
    def merging(text: str) -> list[int]:
        return [PIECES.index(b"true")] if text == "true" else encode(text)

    compiler = GrammarCompiler(lambda: Vocabulary(PIECES, frozenset({EOS}), merging), VOCAB_SIZE, [EOS])
    assert allowed(compiler.get(regex("true")).matcher()) == [PIECES.index(b"true")]


def test_a_tokenizer_that_adds_a_space_does_not_disturb() -> None:
    def with_space(text: str) -> list[int]:
        return list((" " + text).encode())

    compiler = GrammarCompiler(lambda: Vocabulary(PIECES, frozenset({EOS}), with_space), VOCAB_SIZE, [EOS])
    matcher = compiler.get(regex("abc")).matcher()
    assert ord("a") in allowed(matcher)
    assert ord(" ") not in allowed(matcher)
