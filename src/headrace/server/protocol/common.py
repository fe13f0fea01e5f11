"""The fields that `/v1/chat/completions` and `/v1/completions` share, with OpenAI's, vLLM's and SGLang's names.

pydantic holds the types (strictly: a bool is no number) and the OpenAPI text; ranges are `processing/validate.py`'s
alone. Fields that mean something to their sender but are not served yet are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import INT64_MAX, check_name, check_number, check_text, refusal
from headrace.processing.structured import GUIDED, Found, grammar_of
from headrace.types import SamplingParams

INT32_MAX = 2**31 - 1
MAX_TIMEOUT_S = 7 * 24 * 3600.0

STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TOKEN_LISTS = {"anyOf": [TOKEN_IDS, {"type": "array", "items": TOKEN_IDS}]}

UNSUPPORTED_EVERYWHERE = {
    "guided_whitespace_pattern": "use structured_outputs with json and whitespace_pattern.",
    "reasoning_max_tokens": "thoughts are told apart on /v1/chat/completions alone.",
    "thinking_token_budget": "thoughts are told apart on /v1/chat/completions alone.",
    "truncate_prompt_tokens": "a prompt is never truncated; shorten it before sending.",
    "allowed_token_ids": "use logit_bias or bad_words_token_ids.",
    "use_beam_search": "only sampling is available.",
    "prompt_embeds": "prompts are text or token ids.",
    "logits_processors": "use logit_bias, bad_words or the penalties.",
    "lora_request": "there are no adapters in this version.",
}
FORMS_OF_OTHERS = {
    "grammar": "use guided_grammar, in Lark or GBNF.",
    "ebnf": "use guided_grammar.",
    "regex": "use guided_regex.",
    "json_schema": "use response_format or guided_json.",
}
"""llama.cpp's and SGLang's names; who asks for a form must not get free text."""

SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}]}
GRAMMAR_FIELDS = ("response_format", "structured_outputs", *GUIDED)


RANGES: dict[str, dict[str, float]] = {
    "n": {"minimum": 1},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": {"minimum": 0, "maximum": INT64_MAX},
    "top_logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
    "priority": {"minimum": -INT32_MAX, "maximum": INT32_MAX},
    "timeout_s": {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}
"""What OpenAPI says of fields whose range no option changes; `processing/validate.py` holds them to it."""


def _show_ranges(schema: dict[str, Any]) -> None:
    for name, shown in schema.get("properties", {}).items():
        shown |= RANGES.get(name, {})


class RequestModel(BaseModel):
    """Base of every request body. Fields that it does not know are kept apart, to be reported."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=(), json_schema_extra=_show_ranges
    )
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}

    def unknown_fields(self) -> list[str]:
        return sorted(set(self.model_extra or ()) - self.UNSUPPORTED.keys())


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(None, description="One more chunk before [DONE] holds the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk holds the usage so far.")


class GenerationRequest(RequestModel):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {**UNSUPPORTED_EVERYWHERE, **FORMS_OF_OTHERS}

    model: str | None = Field(None, description="A served name; absent: the first one.")
    stream: bool | None = Field(None, description="Server-sent events, one chunk per piece of text.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="Choices per prompt, 1 to --max-n. Choice i uses seed + i.")
    max_tokens: int | None = Field(
        None, description="Most tokens to generate, at least 1, cut to what the context leaves."
    )
    min_tokens: int | None = Field(None, description="Tokens before an end-of-sequence or stop token may come.")
    temperature: float | None = Field(None, description=">= 0; 0 is greedy. Default: the model's, else 1.")
    top_p: float | None = Field(None, description="In (0, 1]. Default: the model's, else 1.")
    top_k: int | None = Field(None, description="-1 or 0: off; else the k most likely tokens.")
    min_p: float | None = Field(None, description="In [0, 1].")
    presence_penalty: float | None = Field(None, description="In [-2, 2].")
    frequency_penalty: float | None = Field(None, description="In [-2, 2].")
    repetition_penalty: float | None = Field(None, description="> 0; 1 is off.")
    seed: int | None = Field(None, description="0 to 2^63 - 1; the same seed gives the same text.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id -> -100 to 100.")
    stop: Annotated[Any, WithJsonSchema(STRINGS)] = Field(
        None, description="Strings that end the output; not part of it."
    )
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = Field(None, description="Words that must not appear.")
    bad_words_token_ids: Annotated[Any, WithJsonSchema(TOKEN_LISTS)] = None
    response_format: dict[str, Any] | None = Field(
        None, description="type text, json_object, json_schema (kept to with strict and without) or structural_tag."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar (Lark or GBNF), json_object, structural_tag; as in vLLM."
    )
    guided_json: Annotated[Any, WithJsonSchema(SCHEMA)] = Field(None, description="structured_outputs.json.")
    guided_regex: str | None = Field(None, description="structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="structured_outputs.grammar.")
    structural_tag: Annotated[Any, WithJsonSchema(SCHEMA)] = Field(None, description="Free text with tags of a form.")
    prompt_logprobs: int | None = Field(
        None, description="Log probabilities of the prompt's tokens and the N most likely."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default true.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own, such as BOS.")
    echo: bool | None = Field(None, description="Repeat the prompt before the output.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Tokens in logprobs are written `token_id:N`.")
    request_id: str | None = Field(None, description="At most 128 printable characters; part of the reply's id.")
    priority: int | None = Field(None, description="Lower runs earlier. Default 0.")
    cache_salt: str | None = Field(None, description="Prefix cache entries are shared only under the same salt.")
    timeout_s: float | None = Field(None, description="Deadline in seconds, waiting included; then 504.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect.")
    user: str | None = Field(None, description="Accepted, without effect.")
    store: bool | None = Field(None, description="Accepted, without effect: nothing is stored.")
    service_tier: str | None = Field(None, description="Accepted, without effect.")
    safety_identifier: str | None = Field(None, description="Accepted, without effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted, without effect: prefixes are found by content.")

    def grammar(self) -> Found | None:
        """What the output must match, and the field that says so."""
        return grammar_of({name: value for name in GRAMMAR_FIELDS if (value := getattr(self, name)) is not None})

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """As the request says it; not validated yet. `more` overrides fields; None stands for the default."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME_NAME}
        fields["stop"] = _strings(self.stop)
        fields["stop_token_ids"] = _as_tuple(self.stop_token_ids)
        fields["bad_words"] = _as_tuple(self.bad_words)
        fields["bad_words_token_ids"] = _token_lists(self.bad_words_token_ids)
        fields["logit_bias"] = _bias(self.logit_bias)
        fields.update(more)
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**defaults, **given})

    def check_common(self) -> None:
        """The fields that are no sampling parameters."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is allowed only with stream: true.", param="stream_options")
        check_queue_fields(self)


class QueueFields(Protocol):
    """What any request to the engine may say about its way there."""

    priority: int | None
    timeout_s: float | None
    cache_salt: str | None
    request_id: str | None


def check_queue_fields(body: QueueFields) -> None:
    if body.priority is not None and not -INT32_MAX <= body.priority <= INT32_MAX:
        raise refusal("priority", body.priority, f"an integer from {-INT32_MAX} to {INT32_MAX}")
    if body.timeout_s is not None:
        check_number(body.timeout_s, "timeout_s", 0.0, MAX_TIMEOUT_S, f"in (0, {MAX_TIMEOUT_S:g}]", open_low=True)
    if body.cache_salt is not None:
        check_text(body.cache_salt, "cache_salt", max_chars=256)
    if body.request_id is not None:
        check_name(body.request_id, "request_id")


_SAME_NAME = (
    "n",
    "min_tokens",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
)


def _as_tuple(value: list[Any] | None) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value)


def _strings(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    raise refusal("stop", value, "a string or a list of strings")


def _token_lists(value: Any) -> tuple[Any, ...] | None:
    """A flat list names single tokens; a list of lists, sequences."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise refusal("bad_words_token_ids", value, "a list of token ids, or of lists of them")
    return tuple(tuple(word) if isinstance(word, list) else (word,) for word in value)


def _bias(value: dict[str, float] | None) -> dict[int, float] | None:
    if value is None:
        return None
    for name in value:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise InvalidRequest(f"logit_bias must name token ids, not {name[:40]!a}.", param="logit_bias")
    return {int(name): number for name, number in value.items()}
