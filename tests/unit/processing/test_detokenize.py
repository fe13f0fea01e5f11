"""Incremental detokenising: equal to decoding at once for every cut, nothing of the prompt, no half characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from headrace.processing.detokenize import MAX_RUN_BYTES, IncrementalDetokenizer
from headrace.processing.pieces import Scheme
from headrace.processing.tokenizer import Tokenizer

shared = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

TEXTS = (
    "hello world",
    "👩‍👩‍👧‍👦 and 👍🏽",
    "한국어 \u1112\u1161\u11ab",
    "ภาษาไทย",
    "中文你你 字",
    "a\n\n\nb",
    "\U00020000é\u0301",
    "hello <|end|> hello",
)


def run(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, skip: bool = True) -> list[str]:
    """What each token and the flush gave."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


def token(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.backend.token_to_id(text)
    assert isinstance(token_id, int)
    return token_id


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    if tokenizer.pieces.scheme is Scheme.BYTE_LEVEL:
        return list(data)
    return [token(tokenizer, f"<0x{byte:02X}>") for byte in data]


@shared
@given(data=st.data(), skip=st.booleans())
def test_any_cut_of_any_tokens_is_the_text_of_all(any_tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    tokenizer = any_tokenizer
    any_id = st.integers(0, tokenizer.vocab_size + 3)  # also ids that the vocabulary does not have
    awkward = st.sampled_from(
        byte_tokens(tokenizer, bytes([0xE4, 0xBD, 0xA0, 0xED, 0xF0, 0x9F, 0x98, 0xC3, 0xA9, 0xFF, 0x0A]))
    )
    ids = data.draw(st.lists(st.one_of(any_id, awkward), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip)
    bounds = [0, *cuts, len(ids)]
    text = "".join(detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@shared
@given(data=st.data())
def test_after_a_prompt_only_the_new_text_comes(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokenizer = any_tokenizer
    ids = tokenizer.encode(data.draw(st.sampled_from(TEXTS)) + data.draw(st.sampled_from(TEXTS)))
    cut = data.draw(st.integers(0, len(ids)))
    text = "".join(run(tokenizer, ids[:cut], ids[cut:]))
    before, whole = (visible_bytes(tokenizer, part).decode("utf-8", "ignore") for part in (ids[:cut], ids))
    assert text == (whole[len(before) :] if cut and before else tokenizer.decode(ids))


def visible_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id not in tokenizer.special_token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_valid_text_never_shows_half_a_character(any_tokenizer: Tokenizer, text: str) -> None:
    parts = run(any_tokenizer, [], any_tokenizer.encode(text))
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize("num_bytes", [1, 2])
def test_prompt_that_ends_within_a_character(any_tokenizer: Tokenizer, num_bytes: int) -> None:
    """The whole prompt once came back in the first delta (a known fault of other servers)."""
    data = "字".encode()
    prompt = any_tokenizer.encode("hello hello ") + byte_tokens(any_tokenizer, data[:num_bytes])
    completed = run(
        any_tokenizer, prompt, [*byte_tokens(any_tokenizer, data[num_bytes:]), *any_tokenizer.encode("b")[-1:]]
    )
    assert "".join(completed) == "字b"
    other = run(any_tokenizer, prompt, any_tokenizer.encode("b")[-1:])
    assert "".join(other) == "b"
    assert "".join(run(any_tokenizer, prompt, [])) == ""


def test_character_spoilt_by_the_output_is_the_outputs(any_tokenizer: Tokenizer) -> None:
    data = "😀".encode()
    prompt = byte_tokens(any_tokenizer, data[:2])
    letter = any_tokenizer.encode("b")[-1]
    text = "".join(run(any_tokenizer, prompt, [*byte_tokens(any_tokenizer, data[2:3]), letter]))
    assert text == "�b"


@pytest.mark.parametrize(
    "data", [b"\xed\xae", b"\xed\xa0\x80", b"a\xed\xb0b", b"\xf4\x90", b"\xe0\x80\x80", b"\xc0\xaf"]
)
def test_bytes_that_look_like_a_beginning_and_are_none(any_tokenizer: Tokenizer, data: bytes) -> None:
    ids = byte_tokens(any_tokenizer, data)
    assert "".join(run(any_tokenizer, [], ids)) == any_tokenizer.decode(ids)


def test_unfinished_character_shows_only_at_the_end(any_tokenizer: Tokenizer) -> None:
    ids = byte_tokens(any_tokenizer, "你".encode()[:2])
    parts = run(any_tokenizer, [], ids)
    assert parts[:-1] == ["", ""]
    assert parts[-1] == any_tokenizer.decode(ids) != ""


def test_space_before_the_first_word(byte_fallback_prefix: Tokenizer) -> None:
    tokenizer = byte_fallback_prefix
    hello, bos = token(tokenizer, "▁hello"), token(tokenizer, "<s>")
    assert "".join(run(tokenizer, [bos], [hello, hello])) == "hello hello"
    assert "".join(run(tokenizer, [bos, hello], [hello])) == " hello"
    assert "".join(run(tokenizer, [bos], [hello], skip=False)) == " hello"


def test_special_tokens_show_on_request(any_tokenizer: Tokenizer) -> None:
    eos = any_tokenizer.eos_token_ids[0]
    letter = any_tokenizer.encode("b")[-1]
    assert "".join(run(any_tokenizer, [], [letter, eos, letter])) == "bb"
    assert "".join(run(any_tokenizer, [], [letter, eos, letter], skip=False)) == f"b{any_tokenizer.eos_token}b"


def test_a_long_run_of_byte_tokens_does_not_wait_for_its_end(byte_fallback: Tokenizer) -> None:
    parts = run(byte_fallback, [], byte_tokens(byte_fallback, b"\n" * 200))
    assert "".join(parts) == "\n" * 200
    assert all(len(part) <= MAX_RUN_BYTES for part in parts)
    assert sum(bool(part) for part in parts[:-1]) == 200 // MAX_RUN_BYTES


def test_offset_is_where_the_tokens_text_begins(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("b\n\n你hello 字 😀", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(any_tokenizer, any_tokenizer.encode("b"))
    starts, done = [], 0
    for token_id in ids:
        text = detokenizer.step(token_id)
        starts.append(done + detokenizer.offset)
        done += len(text)
    data, sizes = b"", []
    for token_id in ids:
        sizes.append(len(data.decode("utf-8", "ignore")))  # whole characters before the token
        data += any_tokenizer.token_bytes(token_id)
    assert starts == sizes


@pytest.fixture(scope="module", params=["WordPiece", "Metaspace", "none"])
def other_scheme(request: pytest.FixtureRequest) -> Tokenizer:
    vocab = {"[UNK]": 0, "un": 1, "##able": 2, "▁a": 3, "b": 4, "▁": 5, "x": 6, "你": 7}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    if request.param != "none":
        backend.decoder = getattr(decoders, request.param)()
    return Tokenizer(backend)


@shared
@given(data=st.data())
def test_other_decoders(other_scheme: Tokenizer, data: st.DataObject) -> None:
    assert other_scheme.pieces.scheme is Scheme.OTHER
    ids = data.draw(st.lists(st.integers(1, 7), max_size=20))
    cut = data.draw(st.integers(0, len(ids)))
    assert "".join(run(other_scheme, [], ids)) == other_scheme.decode(ids)
    assert (
        "".join(run(other_scheme, ids[:cut], ids[cut:]))
        == other_scheme.decode(ids)[len(other_scheme.decode(ids[:cut])) :]
    )
