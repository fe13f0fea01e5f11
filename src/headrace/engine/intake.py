"""How a request enters the engine: checked for all that could hurt a step shared with others, then made into sequences.

Front ends validate with field-level care (`processing/validate.py`); this is the engine's own guard, because trainers
and the offline API submit without a front end. The core calls it and does the queueing.
"""

from __future__ import annotations

import collections.abc
import math
import random
from array import array

from headrace.engine.sequence import PromptGroup, Request, Sequence
from headrace.errors import ContextLengthExceeded, Draining, InvalidRequest, Unavailable
from headrace.transport.messages import EngineInfo, Lifecycle, Submit
from headrace.types import ALL_LOGPROBS, POOLINGS, SamplingParams

MAX_SEED = 2**63 - 1
_ASLEEP_RETRY_S = 5

MAX_CHOICES = 65536
"""Of one request; a front end's own limit is far lower."""


class Intake:
    """Makes requests; knows the engine's limits and the order of receipt."""

    def __init__(self, info: EngineInfo, eos_ids: frozenset[int], priority_ageing_s: float) -> None:
        self._info = info
        self._eos_ids = eos_ids
        self._ageing_s = priority_ageing_s
        self._num_received = 0
        self._seeds = random.Random()

    def admit(self, client: int, submit: Submit, now_s: float) -> Request:
        """A request with one WAITING sequence per choice. Raises InvalidRequest if it cannot run."""
        try:
            check_submit(submit, self._info)
        except (TypeError, ValueError) as error:  # no front end and no codec has looked at the types
            raise InvalidRequest(f"the request is malformed: {error}") from error
        params = submit.params
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            client,
            submit,
            ordinal=self._num_received,
            arrival_s=now_s,
            priority_key=now_s + submit.priority * self._ageing_s,
            # Where a grammar lets the EOS come, the text is complete: it ends with ignore_eos too.
            stop_ids=stop_ids if params.ignore_eos and params.grammar is None else stop_ids | self._eos_ids,
            is_cacheable=self._info.has_prefix_cache,
        )
        self._num_received += 1
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        limit = max_sequence_tokens(self._info)
        for prompt in submit.prompts:
            group = PromptGroup()
            max_total = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
            for index in range(params.n):
                choice = len(request.sequences)
                seq = Sequence(request, choice, group, prompt, seed=seed + index, max_total_tokens=max_total)
                request.sequences.append(seq)
        request.num_live = len(request.sequences)
        return request


def check_lifecycle(lifecycle: Lifecycle, holds_while_asleep: bool) -> None:
    """Raises Unavailable in a state that takes no requests."""
    if lifecycle.is_draining:
        raise Draining
    if lifecycle.state == "poisoned":
        raise Unavailable(f"there are no weights: {lifecycle.reason}", code="weights_poisoned")
    if lifecycle.state == "asleep" and not holds_while_asleep:
        tags = " and ".join(lifecycle.asleep)
        raise Unavailable(f"the engine sleeps ({tags})", code="asleep", retry_after_s=_ASLEEP_RETRY_S)


def num_refusals(submit: Submit) -> int:
    """How many choices the sender of a refused request waits for; at least one, so that it hears of it at all."""
    return min(MAX_CHOICES, max(1, len(submit.prompts) * max(1, submit.params.n)))


def check_submit(submit: Submit, info: EngineInfo) -> None:
    """Raises InvalidRequest for a request that cannot run."""
    if submit.params.n < 1:
        raise InvalidRequest(f"n must be at least 1, got {submit.params.n}", param="n")
    if not submit.prompts:
        raise InvalidRequest("the request has no prompt", param="prompt")
    if len(submit.prompts) * submit.params.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(submit.prompts)} prompts times n of {submit.params.n} are more than {MAX_CHOICES} choices", param="n"
        )
    for name in ("timeout_s", "queue_timeout_s"):
        seconds = getattr(submit, name)
        if seconds is not None and not math.isfinite(seconds):
            raise InvalidRequest(f"{name} must be a finite number, got {seconds}", param=name)
    _check_params(submit.params, info.vocab_size)
    _check_pooling(submit.params, info)
    for index, prompt in enumerate(submit.prompts):
        if not prompt:
            raise InvalidRequest(f"prompt {index} has no tokens", param="prompt")
        _check_ids(prompt, info.vocab_size, "prompt")
        _check_length(len(prompt), submit.params, info)


def _check_pooling(params: SamplingParams, info: EngineInfo) -> None:
    if params.pooling is None:
        return
    if params.pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be {' or '.join(POOLINGS)}, got {params.pooling}", param="pooling")
    if not info.embedding_size:
        raise InvalidRequest("this engine gives no embeddings", param="pooling")
    if params.n != 1:
        raise InvalidRequest(f"n must be 1 for an embedding, got {params.n}", param="n")
    for name in ("prompt_logprobs", "grammar", "thinking"):
        if getattr(params, name) is not None:
            raise InvalidRequest(f"{name} means nothing for an embedding", param=name)


def max_sequence_tokens(info: EngineInfo) -> int:
    """The longest prompt plus output: the model's length or the whole KV memory, whichever is less."""
    return min(info.max_model_len, info.max_kv_tokens)


def _check_length(num_prompt_tokens: int, params: SamplingParams, info: EngineInfo) -> None:
    limit, min_tokens = max_sequence_tokens(info), params.min_tokens
    is_pooled = params.pooling is not None
    if num_prompt_tokens + max(min_tokens, 0) < limit + is_pooled:
        return
    what = "the maximum context length" if limit == info.max_model_len else "what the KV memory can hold"
    minimum = f" and min_tokens of {min_tokens}" if min_tokens > 0 else ""
    together = "that" if is_pooled else "together with at least one new token that"
    raise ContextLengthExceeded(
        f"the prompt has {num_prompt_tokens} tokens{minimum}; {together} must stay within {what}, {limit} tokens",
        param="prompt",
    )


def _check_ids(token_ids: collections.abc.Sequence[int], vocab_size: int, param: str) -> None:
    try:
        ids = array("q", token_ids)
    except (TypeError, OverflowError):
        raise InvalidRequest("token ids must be whole numbers of at most 63 bits", param=param) from None
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside of the vocabulary, 0 to {vocab_size - 1}", param=param
            )


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {params.max_tokens}", param="max_tokens")
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise InvalidRequest(f"seed must be from 0 to {MAX_SEED}, got {params.seed}", param="seed")
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -math.inf, math.inf),
        ("frequency_penalty", -math.inf, math.inf),
        ("repetition_penalty", 0.0, math.inf),
    ):
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name} must be a number from {low} to {high}, got {value}", param=name)
    if params.repetition_penalty == 0:
        raise InvalidRequest("repetition_penalty must be above 0", param="repetition_penalty")
    if params.top_k < -1:
        raise InvalidRequest(f"top_k must be -1, 0 or more, got {params.top_k}", param="top_k")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value < ALL_LOGPROBS:
            raise InvalidRequest(f"{name} must be -1 or more, got {value}", param=name)
    if params.stop_token_ids:
        _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    for word in params.bad_words_token_ids:
        if not word:
            raise InvalidRequest("a bad word has no tokens", param="bad_words_token_ids")
        _check_ids(word, vocab_size, "bad_words_token_ids")
    if params.thinking is not None:
        if params.thinking.max_tokens < 0:
            raise InvalidRequest(
                f"thinking must allow 0 tokens or more, got {params.thinking.max_tokens}", param="thinking"
            )
        for marker in (params.thinking.close_ids, params.thinking.open_ids):
            if not marker:
                raise InvalidRequest("a marker of the thoughts has no tokens", param="thinking")
            _check_ids(marker, vocab_size, "thinking")
    if params.logit_bias:
        _check_ids(tuple(params.logit_bias), vocab_size, "logit_bias")
        for token_id, bias in params.logit_bias.items():
            if not math.isfinite(bias):
                raise InvalidRequest(f"the bias of token {token_id} must be finite, got {bias}", param="logit_bias")
