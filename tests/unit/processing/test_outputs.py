"""Deltas of token ids become deltas of text: the same however they were cut, stop strings and usage included."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.client.base import Delta
from headrace.errors import ErrorInfo
from headrace.processing.logprobs import LOWEST_LOGPROB
from headrace.processing.outputs import ChoiceAssembler, OutputAssembler, TextDelta
from headrace.processing.tokenizer import Tokenizer
from headrace.transport.messages import Submit
from headrace.types import FinishReason, LogprobRows, RequestId, SamplingParams

shared = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def rows(ids: Sequence[int], num_top: int = 1) -> LogprobRows:
    """Log probabilities that tell where they came from: the token's id over 1000, negated."""
    token_ids = np.array([[token_id, *range(num_top)] for token_id in ids], np.int32).reshape(-1, 1 + num_top)
    return LogprobRows.from_arrays(token_ids, -token_ids.astype(np.float32) / 1000, np.full(len(ids), 3, np.int32))


def deltas_of(
    ids: Sequence[int], cuts: Sequence[int], finish: FinishReason, stop_token_id: int | None = None, choice: int = 0
) -> list[Delta]:
    last = max(len(ids) - 1, 0)  # the engine says that a choice ended together with its last token
    bounds = [0, *sorted(min(cut, last) for cut in cuts), len(ids)]
    deltas = [Delta(choice, list(ids[a:b]), rows(ids[a:b])) for a, b in pairwise(bounds)]
    deltas[-1].finish_reason, deltas[-1].stop_token_id = finish, stop_token_id
    return deltas


def joined(outputs: Sequence[TextDelta]) -> dict[str, Any]:
    finished = [output for output in outputs if output.finish_reason is not None]
    assert len(finished) <= 1
    return {
        "text": "".join(output.text for output in outputs),
        "ids": [token_id for output in outputs for token_id in output.token_ids],
        "logprobs": [entry.token_id for output in outputs for entry in output.logprobs or []],
        "finish": [(output.finish_reason, output.stop_reason) for output in finished],
    }


def run(tokenizer: Tokenizer, params: SamplingParams, deltas: Sequence[Delta]) -> dict[str, Any]:
    assembler = ChoiceAssembler(tokenizer, [], params)
    result = joined([assembler.push(delta) for delta in deltas])
    assert assembler.num_tokens == len(result["ids"])
    assert result["logprobs"] == result["ids"]
    return result


@shared
@given(data=st.data())
def test_the_cut_into_deltas_changes_nothing(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokenizer = any_tokenizer
    eos = tokenizer.eos_token_ids[0]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    if text := tokenizer.decode(ids):
        start = data.draw(st.integers(0, len(text) - 1))
        stops = [text[start : start + data.draw(st.integers(1, 4))]]
    else:
        stops = ["x"]
    finish, stop_token_id = data.draw(st.sampled_from([(FinishReason.LENGTH, None), (FinishReason.STOP, eos)]))
    params = SamplingParams(
        stop=tuple(data.draw(st.sampled_from([stops, [*stops, "�"], []]))),
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 3)),
    )
    if stop_token_id is not None:
        ids = [*ids, eos]
    whole = run(tokenizer, params, deltas_of(ids, [], finish, stop_token_id))
    cuts = data.draw(st.lists(st.integers(0, 20), max_size=20))
    assert run(tokenizer, params, deltas_of(ids, cuts, finish, stop_token_id)) == whole
    assert run(tokenizer, params, deltas_of(ids, range(21), finish, stop_token_id)) == whole


@shared
@given(
    text=st.text("abc你\n", min_size=1, max_size=20),
    stops=st.lists(st.text("abc你\n", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_text_and_tokens_end_at_the_same_place(
    any_tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, include: bool
) -> None:
    """Against the rule written plainly: on the whole text, with the byte offsets of its tokens."""
    tokenizer = any_tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = [tokenizer.token_bytes(token_id) for token_id in ids]
    if tokenizer.pieces.strips_first_space:
        data[0] = data[0].removeprefix(b" ")
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include)
    result = run(tokenizer, params, deltas_of(ids, range(len(ids)), FinishReason.LENGTH))
    whole = [len(b"".join(data[:n]).decode("utf-8", "ignore")) for n in range(len(data) + 1)]
    assert whole[-1] == len(text)
    # A byte run's text counts as its own tokens', so a match may end in any token after the first min_tokens ones.
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if min_tokens == 0 and ends:
        stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        limit = ends[0] if include else ends[0] - len(stop)
        assert result["text"] == text[:limit]
        assert result["ids"] == [token_id for token_id, start in zip(ids, whole, strict=False) if start < limit]
        assert result["finish"] == [(FinishReason.STOP, stop)]
    elif not ends:
        assert (result["text"], result["ids"]) == (text, ids)
        assert result["finish"] == [(FinishReason.LENGTH, None)]


def test_stop_string_does_not_count_before_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ababab")
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "ababa"), (6, "ababab")):
        params = SamplingParams(stop=("b",), min_tokens=min_tokens)
        assert run(byte_level, params, deltas_of(ids, range(6), FinishReason.LENGTH))["text"] == expected


def test_text_held_back_by_early_tokens_does_not_count(byte_fallback: Tokenizer) -> None:
    newline, letter = byte_fallback.backend.token_to_id("<0x0A>"), byte_fallback.backend.token_to_id("a")
    for finish, tail in ((FinishReason.LENGTH, [letter]), (FinishReason.STOP, [2])):  # 2 is EOS
        for min_tokens, expected in ((0, ""), (1, "\na" if tail == [letter] else "\n")):
            params = SamplingParams(stop=("\n",), min_tokens=min_tokens)
            deltas = deltas_of([newline, *tail], [1], finish, 2 if tail == [2] else None)
            assert run(byte_fallback, params, deltas)["text"] == expected


@pytest.mark.parametrize(
    ("include", "skip_special", "expected"),
    [(False, True, "hello"), (False, False, "hello"), (True, True, "hello"), (True, False, "hello<|end|>")],
)
def test_text_of_eos(byte_level: Tokenizer, include: bool, skip_special: bool, expected: str) -> None:
    eos = byte_level.eos_token_ids[0]
    ids = [*byte_level.encode("hello"), eos]
    for stops in ((), ("never",)):
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip_special, stop=stops)
        result = run(byte_level, params, deltas_of(ids, [1], FinishReason.STOP, eos))
        assert result["text"] == expected
        assert result["ids"] == ids  # the EOS token counts
        assert result["finish"] == [(FinishReason.STOP, None)]


def test_stop_token_is_named_and_its_text_left_out(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab")
    for include, expected in ((False, "a"), (True, "ab")):
        params = SamplingParams(stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
        result = run(byte_level, params, deltas_of(ids, [], FinishReason.STOP, ids[-1]))
        assert (result["text"], result["ids"]) == (expected, ids)
        assert result["finish"] == [(FinishReason.STOP, ids[-1])]


def test_unfinished_character_can_complete_a_stop_string_at_the_end(byte_level: Tokenizer) -> None:
    params = SamplingParams(stop=("�",))
    result = run(byte_level, params, deltas_of([*byte_level.encode("a"), 0xE4, 0xBD], [1, 2], FinishReason.LENGTH))
    assert (result["text"], result["finish"]) == ("a", [(FinishReason.STOP, "�")])
    assert result["ids"] == byte_level.encode("a")


def test_held_tokens_come_with_their_text(byte_level: Tokenizer) -> None:
    assembler = ChoiceAssembler(byte_level, [], SamplingParams(stop=("abc",)))
    first = assembler.push(Delta(0, byte_level.encode("xab")))
    assert (first.text, first.token_ids) == ("x", byte_level.encode("x"))
    second = assembler.push(Delta(0, byte_level.encode("d")))
    assert (second.text, second.token_ids) == ("abd", byte_level.encode("abd"))
    assert not assembler.wants_abort


def test_logprobs_show_text_and_exact_bytes(byte_level: Tokenizer) -> None:
    ids = [byte_level.backend.token_to_id("Ġhello"), 0xE4]
    token_ids = np.array([[ids[0], ids[1]], [ids[1], ids[0]]], np.int32)
    logprobs = np.array([[-0.5, -np.inf], [np.nan, -2.0]], np.float32)
    delta = Delta(0, ids, LogprobRows.from_arrays(token_ids, logprobs, np.array([1, 9], np.int32)))
    first, second = ChoiceAssembler(byte_level, [], SamplingParams(logprobs=1)).push(delta).logprobs or []
    assert (first.token, first.bytes, first.logprob, first.rank) == (" hello", b" hello", -0.5, 1)
    assert [(top.token, top.bytes, top.logprob, top.rank) for top in first.top] == [("�", b"\xe4", LOWEST_LOGPROB, 1)]
    assert (second.token, second.bytes, second.logprob, second.rank) == ("�", b"\xe4", LOWEST_LOGPROB, 9)


class FakeStream:
    """Plays what a client would deliver, and what it is told."""

    request_id = RequestId(1)

    def __init__(self, batches: Sequence[list[Delta]]) -> None:
        self._batches = batches
        self.aborted: list[int] = []
        self.closed: list[str] = []

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        for batch in self._batches:
            yield batch

    def abort_choice(self, choice: int) -> None:
        self.aborted.append(choice)

    def close(self, reason: str = "disconnect") -> None:
        self.closed.append(reason)


def submit(tokenizer: Tokenizer, prompts: Sequence[str], params: SamplingParams) -> Submit:
    ids = tuple(tuple(tokenizer.encode(prompt)) for prompt in prompts)
    return Submit(request_id=RequestId(1), public_id="cmpl-1", prompts=ids, params=params)


async def test_stop_match_aborts_the_choice_and_swallows_the_rest(byte_level: Tokenizer) -> None:
    enc = byte_level.encode
    stream = FakeStream(
        [
            [Delta(0, enc("a."), num_cached_tokens=2), Delta(1, enc("xy"), num_cached_tokens=2)],
            [Delta(0, enc("bc")), Delta(1, enc("z"))],
            [Delta(0, finish_reason=FinishReason.ABORT), Delta(1, finish_reason=FinishReason.LENGTH)],
        ]
    )
    request = submit(byte_level, ["hello"], SamplingParams(n=2, stop=(".",)))
    assembler = OutputAssembler(byte_level, request, stream)
    outputs = [text for texts in [batch async for batch in assembler] for text in texts]
    assert stream.aborted == [0]
    first, second = (joined([output for output in outputs if output.choice == choice]) for choice in (0, 1))
    assert (first["text"], first["finish"]) == ("a", [(FinishReason.STOP, ".")])
    assert (second["text"], second["finish"]) == ("xyz", [(FinishReason.LENGTH, None)])
    assert assembler.usage.prompt_tokens == len(enc("hello"))
    assert assembler.usage.completion_tokens == 4
    assert assembler.usage.cached_tokens == 2


async def test_no_abort_when_the_engine_has_finished_too(byte_level: Tokenizer) -> None:
    stream = FakeStream([[Delta(0, byte_level.encode("a."), finish_reason=FinishReason.LENGTH)]])
    assembler = OutputAssembler(byte_level, submit(byte_level, ["x"], SamplingParams(stop=(".",))), stream)
    outputs = [text for texts in [batch async for batch in assembler] for text in texts]
    assert [(output.text, output.finish_reason) for output in outputs] == [("a", FinishReason.STOP)]
    assert stream.aborted == []


async def test_usage_counts_each_prompt_once(byte_level: Tokenizer) -> None:
    finish = FinishReason.LENGTH
    deltas = [Delta(c, [97], finish_reason=finish, num_cached_tokens=10 * (c // 2 + 1)) for c in range(4)]
    assembler = OutputAssembler(
        byte_level, submit(byte_level, ["aa", "aaaa"], SamplingParams(n=2)), FakeStream([deltas])
    )
    assert [len(batch) async for batch in assembler] == [4]
    usage = assembler.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (6, 4, 30)


async def test_empty_deltas_are_left_out(byte_level: Tokenizer) -> None:
    stream = FakeStream([[Delta(0)], [Delta(0, [97], finish_reason=FinishReason.LENGTH)]])
    assembler = OutputAssembler(byte_level, submit(byte_level, ["a"], SamplingParams()), stream)
    assert [[output.text for output in batch] async for batch in assembler] == [["a"]]


async def test_an_error_ends_the_choice_with_its_reason(byte_level: Tokenizer) -> None:
    error = ErrorInfo(503, "unavailable", "engine_dead", "the engine died")
    stream = FakeStream([[Delta(0, [97])], [Delta(0, finish_reason=FinishReason.ERROR, error=error)]])
    assembler = OutputAssembler(byte_level, submit(byte_level, ["a"], SamplingParams(stop=("ab",))), stream)
    outputs = [text for texts in [batch async for batch in assembler] for text in texts]
    assert "".join(output.text for output in outputs) == "a"  # what was held back is not lost
    assert (outputs[-1].finish_reason, outputs[-1].error) == (FinishReason.ERROR, error)


async def test_a_stream_that_breaks_off_is_an_error(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, submit(byte_level, ["a"], SamplingParams()), FakeStream([[Delta(0, [97])]]))
    outputs = [text for texts in [batch async for batch in assembler] for text in texts]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error is not None


async def test_prompt_logprobs_pass(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode("ab")
    delta = Delta(0, prompt_logprobs=rows(prompt[1:]))
    last = Delta(0, [99], finish_reason=FinishReason.LENGTH)
    request = submit(byte_level, ["ab"], SamplingParams(prompt_logprobs=1))
    assembler = OutputAssembler(byte_level, request, FakeStream([[delta], [last]]))
    outputs = [text for texts in [batch async for batch in assembler] for text in texts]
    assert [[entry.token for entry in output.prompt_logprobs or []] for output in outputs] == [["b"], []]


def test_close_reaches_the_stream(byte_level: Tokenizer) -> None:
    stream = FakeStream([])
    OutputAssembler(byte_level, submit(byte_level, ["a"], SamplingParams()), stream).close("disconnect")
    assert stream.closed == ["disconnect"]
