"""Every rule on sampling parameters and lengths: what is refused, with which param, and what passes in which form."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.options import AdmissionConfig
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.processing.checks import shown
from headrace.processing.validate import resolve_words, validate_params, validate_request
from headrace.transport.messages import EngineInfo
from headrace.types import SamplingParams

ADMISSION = AdmissionConfig()
V = 1000


def engine(**fields: Any) -> EngineInfo:
    values = {"max_model_len": 100, "num_blocks": 64, "block_size": 4, "vocab_size": V, **fields}
    return EngineInfo(model="m", max_num_seqs=8, backend="b", **values)


INFO = engine()


def check(**fields: Any) -> SamplingParams:
    return validate_params(SamplingParams(**fields), ADMISSION, INFO)


NOT_NUMBERS = ["1", True, None, [], {}, math.nan, math.inf, -math.inf]
REFUSED: list[tuple[str, Any]] = [
    *((name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty") for value in NOT_NUMBERS),
    *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in [*NOT_NUMBERS, -2.01, 2.01]),
    ("temperature", -0.01),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e-30),
    *(("top_k", value) for value in (-2, 1.0, "1", True, None)),
    *(("n", value) for value in (0, -1, 129, 1.0, "1", True, None)),
    *(("max_tokens", value) for value in (0, -1, 1.5, "1", True)),
    *(("min_tokens", value) for value in (-1, 1.5, "1", True, None)),
    *(("seed", value) for value in (-1, 2**63, 1.0, "1", True)),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, -2, 21, 1.0, "1", True)),
    *((name, value) for name in ("ignore_eos", "skip_special_tokens") for value in (0, 1, "true", None)),
    ("include_stop_str_in_output", 1),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {V: 1.0}),
    ("logit_bias", {2**31: 1.0}),
    ("logit_bias", {"abc": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", [1]),
    *(("stop_token_ids", value) for value in ((V,), (-1,), ("1",), (True,), (1.0,), "12", 5)),
    *(("stop", value) for value in ("word", ("",), (1,), (None,), ("x",) * 17)),
    *(("bad_words", value) for value in ("word", ("",), (1,), ("x" * 5000,), ("x",) * 1025)),
    *(("bad_words_token_ids", value) for value in (((V,),), ((),), (1,), ((True,),), ((1,) * 65,))),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: shown(value)[:40])
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0] == field
    assert caught.value.status == 400
    assert field in caught.value.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -100.5, 101, "1", True, None])
def test_refused_bias_names_its_token(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(logit_bias={5: value})
    assert caught.value.param == "logit_bias.5"


@pytest.mark.parametrize(
    ("field", "value", "normal"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 1, 1.0),
        ("temperature", 1e-300, 0.0),
        ("temperature", 1e300, 1e6),
        ("top_p", 1, 1.0),
        ("top_p", 1e-300, 1e-6),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", 10**30 % (2**63), V),
        ("top_k", 5, 5),
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", 1, 1.0),
        ("seed", 0, 0),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("n", 128, 128),
        ("logprobs", 0, 0),
        ("logprobs", 20, 20),
        ("stop", ["a", "b"], ("a", "b")),
        ("logit_bias", {}, None),
        ("logit_bias", {0: -100, V - 1: 100}, {0: -100.0, V - 1: 100.0}),
        ("stop_token_ids", [0, V - 1], (0, V - 1)),
        ("bad_words_token_ids", [[1, 2]], ((1, 2),)),
    ],
)
def test_accepted_in_normal_form(field: str, value: Any, normal: Any) -> None:
    got = getattr(check(**{field: value}), field)
    assert got == normal
    assert type(got) is type(normal)


def test_all_logprobs_needs_the_server_to_allow_the_vocabulary() -> None:
    every = AdmissionConfig(max_logprobs=-1)
    assert validate_params(SamplingParams(logprobs=-1), every, INFO).logprobs == -1
    assert validate_params(SamplingParams(logprobs=V), every, INFO).logprobs == V
    with pytest.raises(InvalidRequest, match="max-logprobs"):
        validate_params(SamplingParams(logprobs=V + 1), every, INFO)


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    assert check(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidRequest) as caught:
        check(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"


def test_errors_use_the_request_s_own_field_names() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_params(SamplingParams(max_tokens=0), ADMISSION, INFO, names={"max_tokens": "max_completion_tokens"})
    assert caught.value.param == "max_completion_tokens"
    assert caught.value.message.startswith("max_completion_tokens")


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_stop_strings_are_counted_in_tokens() -> None:
    resolve_words(SamplingParams(stop=("x" * 64,)), encode, ADMISSION)
    with pytest.raises(InvalidRequest) as caught:
        resolve_words(SamplingParams(stop=("fine", "x" * 65)), encode, ADMISSION)
    assert caught.value.param == "stop[1]"
    assert "64" in caught.value.message


def test_a_huge_stop_string_is_refused_unread() -> None:
    def never(text: str) -> list[int]:
        raise AssertionError("tokenised")

    with pytest.raises(InvalidRequest):
        resolve_words(SamplingParams(stop=("x" * 10_000_000,)), never, ADMISSION)


def test_bad_words_become_ids_with_and_without_a_space() -> None:
    params = resolve_words(SamplingParams(bad_words=("ab", " c"), bad_words_token_ids=((9,),)), encode, ADMISSION)
    assert params.bad_words_token_ids == ((9,), (97, 98), (32, 97, 98), (32, 99))


def resolve(prompts: list[list[int]], info: EngineInfo = INFO, **fields: Any) -> SamplingParams:
    default = fields.pop("default_max_tokens", None)
    return validate_request(prompts, SamplingParams(**fields), ADMISSION, info, default_max_tokens=default)


def test_max_tokens_is_what_is_left_of_the_context() -> None:
    assert resolve([[1] * 10]).max_tokens == 90
    assert resolve([[1] * 10], max_tokens=5).max_tokens == 5
    assert resolve([[1] * 10], max_tokens=10**12).max_tokens == 90
    assert resolve([[1] * 10], default_max_tokens=16).max_tokens == 16
    assert resolve([[1] * 90], default_max_tokens=16).max_tokens == 10
    assert resolve([[1] * 99]).max_tokens == 1


def test_the_longest_prompt_sets_the_room_of_all() -> None:
    assert resolve([[1] * 10, [1] * 60, [1]]).max_tokens == 40


@pytest.mark.parametrize(("length", "min_tokens"), [(100, 0), (500, 0), (99, 1), (50, 50)])
def test_too_long_says_both_numbers(length: int, min_tokens: int) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        resolve([[1], [1] * length], min_tokens=min_tokens)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt[1]"
    assert str(length) in caught.value.message
    assert "100" in caught.value.message


def test_a_prompt_that_never_fits_the_kv_memory_is_refused() -> None:
    small = engine(num_blocks=8)  # 32 tokens
    assert resolve([[1] * 31], small).max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match="KV memory"):
        resolve([[1] * 33], small)


@pytest.mark.parametrize("bad", [V, -1, 2**31])
def test_token_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve([[1, bad]])
    assert caught.value.param == "prompt"
    assert str(bad) in caught.value.message


def test_empty_prompts_are_refused() -> None:
    for prompts in ([], [[]], [[1], []]):
        with pytest.raises(InvalidRequest):
            resolve(prompts)


def test_more_choices_than_the_queue_can_ever_hold_is_the_request_s_fault() -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve([[1]] * 9, n=128)
    assert caught.value.param == "n"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(field=st.sampled_from(SamplingParams.__struct_fields__), value=JUNK)
def test_junk_is_refused_or_normalised_and_nothing_else_is_raised(field: str, value: Any) -> None:
    try:
        params = check(**{field: value})
    except InvalidRequest as error:
        refused = error
    else:
        assert validate_params(params, ADMISSION, INFO) == params
        return
    assert refused.param
    assert len(refused.message) < 1000


def test_an_integer_too_long_to_print_is_still_a_refusal() -> None:
    with pytest.raises(InvalidRequest, match="type int"):
        check(seed=10**5000)
    with pytest.raises(InvalidRequest):
        check(temperature=10**5000)
