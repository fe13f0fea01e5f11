"""The one validator of sampling parameters and of what fits into the model, for every route and for `LLM`.

It raises InvalidRequest with the field's path, and returns parameters in one form: numbers as floats, limits resolved,
values that mean the same as another replaced by it. It knows numbers and token ids; text becomes ids in `inputs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from headrace.config.options import AdmissionConfig
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.processing.checks import (
    INT64_MAX,
    check_bool,
    check_int,
    check_number,
    check_text,
    check_token_ids,
    refusal,
    shown,
)
from headrace.transport.messages import EngineInfo
from headrace.types import ALL_LOGPROBS, POOLINGS, SamplingParams

GREEDY_BELOW = 1e-5  # dividing logits by less than this overflows float32; the distribution is a point by then
HOTTEST = 1e6  # and above this it is uniform in float32
LEAST_TOP_P = 1e-6
REPETITION_LOW, REPETITION_HIGH = 1e-6, 1e6  # outside, the products leave float32
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_STOP_CHARS_PER_TOKEN = 64  # a stop string above this many characters per allowed token is refused unread


class _Paths:
    """Names the fields as their sender wrote them: `max_completion_tokens`, not `max_tokens`."""

    def __init__(self, names: Mapping[str, str] | None) -> None:
        self._names = names or {}

    def __call__(self, field: str) -> str:
        return self._names.get(field, field)


def validate_params(
    params: SamplingParams,
    admission: AdmissionConfig,
    info: EngineInfo,
    *,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Checks every field of `params` and returns it in normal form. `names`: field -> what the request calls it."""
    path = _Paths(names)
    check_int(params.n, path("n"), 1, admission.max_n)
    if params.max_tokens is not None:
        check_int(params.max_tokens, path("max_tokens"), 1, INT64_MAX, "an integer >= 1")
    check_int(params.min_tokens, path("min_tokens"), 0, INT64_MAX, "an integer >= 0")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens ({params.min_tokens}) must not exceed {path('max_tokens')} ({params.max_tokens}).",
            param=path("min_tokens"),
        )
    if params.seed is not None:
        check_int(params.seed, path("seed"), 0, INT64_MAX, "an integer from 0 to 2^63 - 1")
    if params.pooling is not None and params.pooling not in POOLINGS:
        raise refusal(path("pooling"), params.pooling, " or ".join(POOLINGS))
    check_bool(params.include_stop_str_in_output, path("include_stop_str_in_output"))
    check_bool(params.ignore_eos, path("ignore_eos"))
    check_bool(params.skip_special_tokens, path("skip_special_tokens"))
    for field in ("logprobs", "prompt_logprobs"):
        _check_num_logprobs(getattr(params, field), path(field), admission.max_logprobs, info.vocab_size)
    return replace(
        params,
        **_numbers(params, path, info.vocab_size),
        logit_bias=_logit_bias(params.logit_bias, path("logit_bias"), info.vocab_size),
        stop=_stop_strings(params.stop, path("stop"), admission.max_stop_strings),
        stop_token_ids=check_token_ids(
            params.stop_token_ids, path("stop_token_ids"), info.vocab_size, max_length=info.vocab_size
        ),
        bad_words=_words(params.bad_words, path("bad_words")),
        bad_words_token_ids=_bad_word_ids(params.bad_words_token_ids, path("bad_words_token_ids"), info.vocab_size),
    )


def _numbers(params: SamplingParams, path: _Paths, vocab_size: int) -> dict[str, Any]:
    temperature = check_number(params.temperature, path("temperature"), 0.0, float("inf"), "a finite number >= 0")
    top_p = check_number(params.top_p, path("top_p"), 0.0, 1.0, "a number in (0, 1]", open_low=True)
    top_k = check_int(params.top_k, path("top_k"), -1, INT64_MAX, "-1, 0 or an integer >= 1")
    return {
        "temperature": 0.0 if temperature < GREEDY_BELOW else min(temperature, HOTTEST),
        "top_p": max(top_p, LEAST_TOP_P),
        "top_k": min(max(top_k, 0), vocab_size),
        "min_p": check_number(params.min_p, path("min_p"), 0.0, 1.0),
        "presence_penalty": check_number(params.presence_penalty, path("presence_penalty"), -2.0, 2.0),
        "frequency_penalty": check_number(params.frequency_penalty, path("frequency_penalty"), -2.0, 2.0),
        "repetition_penalty": check_number(
            params.repetition_penalty,
            path("repetition_penalty"),
            REPETITION_LOW,
            REPETITION_HIGH,
            f"a number > 0 (from {REPETITION_LOW:g} to {REPETITION_HIGH:g})",
        ),
    }


def _check_num_logprobs(count: Any, param: str, max_logprobs: int, vocab_size: int) -> None:
    if count is None:
        return
    limit = vocab_size if max_logprobs == ALL_LOGPROBS else min(max_logprobs, vocab_size)
    may_ask_all = limit == vocab_size
    allowed = f"an integer from {ALL_LOGPROBS if may_ask_all else 0} to {limit}"
    check_int(count, param, ALL_LOGPROBS if may_ask_all else 0, limit, f"{allowed} (see --max-logprobs)")


def _logit_bias(bias: Any, param: str, vocab_size: int) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise refusal(param, bias, "an object from token id to a number")
    checked = {}
    for token_id, value in bias.items():
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} must name token ids from 0 to {vocab_size - 1}, not {shown(token_id)}.", param=param
            )
        checked[token_id] = check_number(value, f"{param}.{token_id}", -100.0, 100.0)
    return checked or None


def _stop_strings(stop: Any, param: str, max_stop_strings: int) -> tuple[str, ...]:
    if not isinstance(stop, list | tuple):
        raise refusal(param, stop, "a string or a list of strings")
    if len(stop) > max_stop_strings:
        raise InvalidRequest(f"{param} must hold at most {max_stop_strings} strings, not {len(stop)}.", param=param)
    return tuple(check_text(text, f"{param}[{index}]") for index, text in enumerate(stop))


def _words(words: Any, param: str) -> tuple[str, ...]:
    if not isinstance(words, list | tuple):
        raise refusal(param, words, "a list of strings")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"{param} must hold at most {MAX_BAD_WORDS} words, not {len(words)}.", param=param)
    max_chars = MAX_BAD_WORD_TOKENS * MAX_STOP_CHARS_PER_TOKEN
    return tuple(check_text(word, f"{param}[{index}]", max_chars=max_chars) for index, word in enumerate(words))


def _bad_word_ids(words: Any, param: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(words, list | tuple):
        raise refusal(param, words, "a list of lists of token ids")
    if len(words) > 2 * MAX_BAD_WORDS:
        raise InvalidRequest(f"{param} must hold at most {2 * MAX_BAD_WORDS} words, not {len(words)}.", param=param)
    checked = []
    for index, word in enumerate(words):
        ids = check_token_ids(word, f"{param}[{index}]", vocab_size, max_length=MAX_BAD_WORD_TOKENS)
        if not ids:
            raise refusal(f"{param}[{index}]", [], "a non-empty list of token ids")
        checked.append(ids)
    return tuple(checked)


def resolve_words(
    params: SamplingParams, encode: Callable[[str], list[int]], admission: AdmissionConfig
) -> SamplingParams:
    """Counts the tokens of the stop strings and turns bad words into ids, at a line's start and after a space."""
    for index, text in enumerate(params.stop):
        param = f"stop[{index}]"
        too_long = f"a string of at most {admission.max_stop_tokens} tokens"
        if len(text) > admission.max_stop_tokens * MAX_STOP_CHARS_PER_TOKEN:
            raise refusal(param, text, too_long)
        if len(encode(text)) > admission.max_stop_tokens:
            raise refusal(param, text, too_long)
    if not params.bad_words:
        return params
    ids = dict.fromkeys(params.bad_words_token_ids)
    for word in params.bad_words:
        for variant in (word, " " + word.lstrip(" ")):
            tokens = tuple(encode(variant))
            if tokens:
                ids[tokens] = None
    return replace(params, bad_words_token_ids=tuple(ids))


def validate_request(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    admission: AdmissionConfig,
    info: EngineInfo,
    *,
    default_max_tokens: int | None = None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """What needs the prompts: ids within the vocabulary, lengths, choices. Returns params with max_tokens set.

    Several prompts of one request share one `max_tokens`: it is cut to the room that the longest of them leaves.
    Prompts that are pooled have none, and need no room.
    """
    is_pooled = params.pooling is not None
    path = _Paths(names)
    if not prompts:
        raise InvalidRequest("There must be at least one prompt, not none.", param=path("prompt"))
    for index, prompt in enumerate(prompts):
        param = path("prompt") if len(prompts) == 1 else f"{path('prompt')}[{index}]"
        if not prompt:
            raise InvalidRequest(f"{param} must hold at least one token, not 0.", param=param)
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            bad = next(token_id for token_id in prompt if not 0 <= token_id < info.vocab_size)
            raise refusal(param, bad, f"made of token ids from 0 to {info.vocab_size - 1}")
        check_length(len(prompt), params.min_tokens, info, param, has_output=not is_pooled)
    check_num_choices(len(prompts) * params.n, admission, path("n"))
    if is_pooled:
        return replace(params, max_tokens=None)
    room = context_limit(info) - max(len(prompt) for prompt in prompts)
    asked = params.max_tokens if params.max_tokens is not None else default_max_tokens
    max_tokens = room if asked is None else min(room, asked)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({params.min_tokens}) must not exceed {path('max_tokens')} ({max_tokens}).",
            param=path("min_tokens"),
        )
    return replace(params, max_tokens=max_tokens)


def check_num_choices(num_choices: int, admission: AdmissionConfig, param: str) -> None:
    """What not even an empty queue could take is the request's fault, not a full queue's."""
    most = admission.max_queued_requests
    if num_choices > most:
        raise InvalidRequest(
            f"A request may have at most {most} choices (prompts times n), not {num_choices}.", param=param
        )


def context_limit(info: EngineInfo) -> int:
    """Prompt and output together, in tokens: the model's context, or the whole KV memory if that is smaller."""
    return min(info.max_model_len, info.max_kv_tokens)


def check_length(
    num_tokens: int,
    min_tokens: int,
    info: EngineInfo,
    param: str,
    *,
    at_least: bool = False,
    has_output: bool = True,
) -> None:
    """Raises ContextLengthExceeded, with both numbers, when nothing could be generated. Nothing is ever truncated.
    `at_least`: there may be more tokens than that. Without output a prompt may fill the context."""
    limit, most = context_limit(info), context_limit(info) - has_output
    if num_tokens + min_tokens <= most:
        return
    what = "context length" if limit == info.max_model_len else "KV memory"
    needs = f"{'at least ' if at_least else ''}{num_tokens} tokens"
    needs += f" and min_tokens asks for {min_tokens} more" if min_tokens else ""
    raise ContextLengthExceeded(
        f"The {what} is {limit} tokens{', output included' if has_output else ''}; the prompt has {needs}. "
        f"At most {most} are allowed.",
        param=param,
    )
