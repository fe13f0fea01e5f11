"""The encoding of every message, held as bytes in tests/golden/messages.json, and what happens to other bytes.

A field may be added at the end with a default; then the golden bytes of that message change, on purpose.
HEADRACE_WRITE_GOLDEN=1 writes the file anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ErrorInfo
from headrace.transport import codec
from headrace.transport.messages import (
    Abort,
    AbortDone,
    Control,
    ControlDone,
    EngineDead,
    EngineInfo,
    EngineReady,
    FromEngine,
    Goodbye,
    Hello,
    Lifecycle,
    RowDetail,
    StepOutputs,
    Submit,
    ToEngine,
)
from headrace.types import GrammarSpec, LogprobRows, RequestId, SamplingParams, ThinkingBudget

GOLDEN = Path(__file__).parents[2] / "golden" / "messages.json"

ROWS = LogprobRows.from_arrays(np.array([[5, 9]]), np.array([[-0.5, -1.5]]), np.array([1]))
ERROR = ErrorInfo(400, "invalid_request_error", "invalid_value", "no", "n", 3)
PARAMS = SamplingParams(
    n=2,
    max_tokens=16,
    min_tokens=1,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    seed=2**63 - 1,
    logit_bias={7: -100.0},
    stop=("end", "Ende"),
    include_stop_str_in_output=True,
    stop_token_ids=(3,),
    ignore_eos=True,
    bad_words=("bad",),
    bad_words_token_ids=((4, 5),),
    logprobs=2,
    prompt_logprobs=-1,
    skip_special_tokens=False,
    grammar=GrammarSpec("regex", "a+"),
    thinking=ThinkingBudget(False, (1,), (2, 3), 100),
    pooling="mean",
)
TO_ENGINE: dict[str, ToEngine] = {
    "hello": Hello(3, "abc"),
    "submit_small": Submit(
        request_id=RequestId(1), public_id="a", prompts=((1, 2),), params=SamplingParams(max_tokens=1)
    ),
    "submit_full": Submit(
        request_id=RequestId(2**40),
        public_id="cmpl-1",
        aliases=("mine",),
        prompts=((1, 2, 300000), (4,)),
        params=PARAMS,
        priority=-5,
        timeout_s=1.5,
        cache_salt="salt",
        queue_timeout_s=0.5,
        trace_parent="00-ab-cd-01",
    ),
    "abort_all": Abort(call_id=1),
    "abort_some": Abort(call_id=2, request_ids=(RequestId(1),), names=("x",), choice=1, reason="disconnect"),
    "control": Control(
        call_id=3, operation="reset_prefix_cache", arguments={"deep": [1, "two", None]}, trace_parent="00-ab-cd-01"
    ),
    "goodbye": Goodbye(),
}
FROM_ENGINE: dict[str, FromEngine] = {
    "ready": EngineReady(
        EngineInfo(
            model="m", vocab_size=10, max_model_len=20, max_num_seqs=2, block_size=16, num_blocks=8, backend="reference"
        )
    ),
    "outputs_small": StepOutputs(request_ids=[1], choices=[0], num_tokens=[1], token_ids=[42], finished=[0]),
    "outputs_full": StepOutputs(
        request_ids=[1, 2],
        choices=[0, 1],
        num_tokens=[2, 0],
        token_ids=[42, 43],
        finished=[1, 4],
        details=[
            RowDetail(row=0, logprobs=ROWS + ROWS, prompt_logprobs=ROWS, num_cached_tokens=0, stop_token_id=43),
            RowDetail(row=1, error=ERROR, queue_s=0.5, prefill_s=0.25, num_preemptions=2),
            RowDetail(row=2, weights_version="step-7", embedding=b"\0\0\x80?"),
        ],
    ),
    "lifecycle": Lifecycle(
        state="poisoned",
        reason="no",
        asleep=("kv_cache",),
        pause_mode="keep",
        version="7",
        epoch=3,
        is_draining=True,
    ),
    "abort_done": AbortDone(1, 2),
    "control_done": ControlDone(3, {"num_blocks": 4}),
    "control_failed": ControlDone(3, None, ERROR),
    "dead": EngineDead("boom"),
}
ALL = {**TO_ENGINE, **FROM_ENGINE}


def golden() -> dict[str, str]:
    if os.environ.get("HEADRACE_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps({name: codec.encode(ALL[name]).hex() for name in ALL}, indent=1) + "\n")
    return typing.cast("dict[str, str]", json.loads(GOLDEN.read_text()))


def decode(name: str, data: bytes) -> Any:
    return codec.decode_to_engine(data) if name in TO_ENGINE else codec.decode_from_engine(data)


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in TO_ENGINE.values()} == set(typing.get_args(ToEngine))
    assert {type(message) for message in FROM_ENGINE.values()} == set(typing.get_args(FromEngine))
    assert set(golden()) == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_golden_bytes(name: str) -> None:
    assert codec.encode(ALL[name]).hex() == golden()[name]
    assert decode(name, bytes.fromhex(golden()[name])) == ALL[name]


def test_a_newer_peer_may_send_more_fields() -> None:
    raw = msgspec.msgpack.decode(codec.encode(TO_ENGINE["submit_full"]))
    assert codec.decode_to_engine(msgspec.msgpack.encode({**raw, "from_the_future": 1})) == TO_ENGINE["submit_full"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x00",
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": "submit"}),
        msgspec.msgpack.encode({"type": "hello", "front_end": "three", "incarnation": "x"}),
        codec.encode(TO_ENGINE["submit_full"])[:-3],
        b"\x91" * 100_000,
        b"\xa3\xff\xff\xff",
    ],
)
def test_other_bytes_are_a_codec_error(data: bytes) -> None:
    for decode_any in (codec.decode_to_engine, codec.decode_from_engine):
        with pytest.raises(codec.CodecError):
            decode_any(data)


def test_a_message_of_the_other_direction_is_a_codec_error() -> None:
    with pytest.raises(codec.CodecError):
        codec.decode_to_engine(codec.encode(FROM_ENGINE["dead"]))
    with pytest.raises(codec.CodecError):
        codec.decode_from_engine(codec.encode(TO_ENGINE["hello"]))


@given(st.binary(max_size=200), st.sampled_from(sorted(ALL)), st.integers(0, 400))
def test_damaged_bytes_never_raise_anything_else(noise: bytes, name: str, at: int) -> None:
    good = codec.encode(ALL[name])
    at %= len(good)
    for data in (noise, good[:at] + noise + good[at + len(noise) :]):
        with contextlib.suppress(codec.CodecError):
            decode(name, data)


ids = st.integers(0, 2**63 - 1)


@given(
    st.lists(st.tuples(ids, st.integers(0, 127), st.integers(0, 3), st.integers(0, 4)), max_size=50),
    st.lists(st.integers(0, 2**31 - 1), max_size=50),
)
def test_outputs_round_trip(rows: list[tuple[int, int, int, int]], token_ids: list[int]) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    message = StepOutputs(
        request_ids=columns[0], choices=columns[1], num_tokens=columns[2], token_ids=token_ids, finished=columns[3]
    )
    assert codec.decode_from_engine(codec.encode(message)) == message
