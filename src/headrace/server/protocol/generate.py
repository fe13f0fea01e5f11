"""Bodies of POST /generate in SGLang's form: prompts as text or ids, sampling under SGLang's names, wishes per prompt.

`dialects/generate.py` reads them. A field may hold one value or one per prompt; every prompt of a request samples in
the same way. The model's own sampling defaults do not apply: a trainer counts on the distribution that it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_bool, check_int, check_name, check_token_ids, refusal
from headrace.processing.structured import Found, conflict, grammar_of
from headrace.server.protocol.common import (
    INT32_MAX,
    SCHEMA,
    STRINGS,
    TOKEN_LISTS,
    UNSUPPORTED_EVERYWHERE,
    GenerationRequest,
    RequestModel,
)
from headrace.types import ALL_LOGPROBS, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
NO_INPUT_LOGPROBS = -1
SAMPLING = "sampling_params"
_TEXT_ONLY = "the served model reads text alone."
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # and what `structured_outputs` calls them
FLAGS = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}}]}
COUNTS = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}
OBJECTS = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}


class GenerateSampling(GenerationRequest):
    """`sampling_params`: SGLang's names beside those that are the same everywhere."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **UNSUPPORTED_EVERYWHERE,
        "stop_regex": "use stop.",
        "custom_params": "there are no custom logit processors.",
        "beam_width": "only sampling is available.",
    }

    json_schema: Annotated[Any, WithJsonSchema(SCHEMA)] = Field(None, description="As a text or an object.")
    regex: str | None = None
    ebnf: str | None = None
    max_new_tokens: int | None = Field(None, description="0: nothing is generated, the prompt is scored.")
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = Field(None, description="Leave the stop string in the text.")
    spaces_between_special_tokens: bool | None = Field(None, description="Accepted, without effect.")

    @property
    def names(self) -> dict[str, str]:
        own = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
        if self.seed is None:
            own["seed"] = "sampling_seed"
        return {name: f"{SAMPLING}.{own.get(name, name)}" for name in SamplingParams.__struct_fields__}

    def constraint(self) -> Found | None:
        """What the output must match, and the field that says so."""
        found = [(kind, field) for field, kind in GRAMMARS.items() if getattr(self, field) is not None]
        if len(found) > 1:
            raise conflict(*(f"{SAMPLING}.{field}" for _, field in found[:2]))
        others = self.grammar()
        if not found:
            return others and (others[0], f"{SAMPLING}.{others[1]}")
        kind, field = found[0]
        if others is not None:
            raise conflict(f"{SAMPLING}.{field}", f"{SAMPLING}.{others[1]}")
        spec = grammar_of({"structured_outputs": {kind: getattr(self, field)}})
        return spec and (spec[0], f"{SAMPLING}.{field}")

    def params(self, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Not validated yet. Scoring alone takes one token, which the reply leaves out."""
        return self.sampling_params(
            {},
            max_tokens=1 if self.max_new_tokens == 0 else self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            seed=self.seed if self.seed is not None else self.sampling_seed,
            include_stop_str_in_output=self.no_stop_trim,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """What one prompt wants to know of its tokens."""

    start: int = NO_INPUT_LOGPROBS  # of the prompt's tokens: from which on
    num_top: int = 0
    token_ids: tuple[int, ...] = ()


class GenerateRequest(RequestModel):
    """Tokens in, tokens out. One prompt gives an object, a list of prompts (or n > 1) a list of them."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "image_data": _TEXT_ONLY,
        "audio_data": _TEXT_ONLY,
        "video_data": _TEXT_ONLY,
        "input_embeds": "prompts are text or token ids.",
        "lora_path": "there are no adapters in this version.",
        "lora_id": "there are no adapters in this version.",
        "return_routed_experts": "this version serves no mixture of experts.",
        "return_hidden_states": "hidden states are not available.",
        "session_params": "there are no sessions: prefixes are found by content.",
        "custom_logit_processor": "use logit_bias, bad_words or the penalties.",
        "bootstrap_host": "prefill and decode are not apart.",
        "bootstrap_room": "prefill and decode are not apart.",
        "background": "send the request without it.",
    }

    text: Annotated[Any, WithJsonSchema(STRINGS)] = Field(None, description="A prompt, or a list of them.")
    input_ids: Annotated[Any, WithJsonSchema(TOKEN_LISTS)] = Field(None, description="The same as token ids.")
    sampling_params: Annotated[Any, WithJsonSchema(OBJECTS)] = Field(None, description="Equal for all prompts.")
    rid: Annotated[Any, WithJsonSchema(STRINGS)] = Field(
        None, description="Names by which /abort_request finds it; the prompts of one call end together."
    )
    return_logprob: Annotated[Any, WithJsonSchema(FLAGS)] = None
    logprob_start_len: Annotated[Any, WithJsonSchema(COUNTS)] = Field(
        None, description="From which of the prompt's tokens on; -1 (the default): only of the output."
    )
    top_logprobs_num: Annotated[Any, WithJsonSchema(COUNTS)] = None
    token_ids_logprob: Annotated[Any, WithJsonSchema(TOKEN_LISTS)] = Field(
        None, description="Tokens whose logprobs are wanted at every position; needs --max-logprobs -1."
    )
    return_text_in_logprobs: bool | None = None
    stream: bool | None = Field(None, description="Frames with the whole text so far, then [DONE].")
    priority: int | None = None
    extra_key: str | None = Field(None, description="As cache_salt.")
    log_metrics: bool | None = Field(None, description="Accepted, without effect.")

    @property
    def prompt_field(self) -> str:
        return "text" if self.text is not None else "input_ids"

    @property
    def is_single(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, str)
        return isinstance(self.input_ids, list) and bool(self.input_ids) and not isinstance(self.input_ids[0], list)

    def prompts(self) -> list[Any]:
        """Looked at more closely by `processing/inputs.py`."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("Exactly one of text and input_ids must be given.", param="text")
        if self.priority is not None:
            check_int(self.priority, "priority", -INT32_MAX, INT32_MAX)
        if self.text is not None:
            if isinstance(self.text, str):
                return [self.text]
            if not isinstance(self.text, list) or not self.text or not all(isinstance(text, str) for text in self.text):
                raise refusal("text", self.text, "a string or a list of strings")
            return self.text
        if not isinstance(self.input_ids, list) or not self.input_ids:
            raise refusal("input_ids", self.input_ids, "a list of token ids or a list of such lists")
        if self.is_single:
            return [self.input_ids]
        for index, ids in enumerate(self.input_ids):
            if not isinstance(ids, list):
                raise refusal(f"input_ids[{index}]", ids, "a list of token ids")
        return self.input_ids

    def sampling(self) -> dict[str, Any]:
        """The one object, unread. Of a list, all must be equal."""
        value = self.sampling_params
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value[1:]):
                raise InvalidRequest(
                    "sampling_params must be equal for all prompts of a call; send prompts that sample differently "
                    "apart.",
                    param=SAMPLING,
                    code="unsupported_field",
                )
            value = value[0]
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise refusal(SAMPLING, value, "an object or a list of objects")
        return value

    def rids(self, num_prompts: int) -> list[str]:
        """The caller's names, one per prompt; none if there are none."""
        if self.rid is None:
            return []
        if isinstance(self.rid, list):
            if len(self.rid) != num_prompts:
                raise InvalidRequest(f"rid must hold {num_prompts} names, not {len(self.rid)}.", param="rid")
            return [check_name(rid, f"rid[{index}]") for index, rid in enumerate(self.rid)]
        rid = check_name(self.rid, "rid")
        return [rid] if self.is_single else [f"{rid}_{index}" for index in range(num_prompts)]

    def wishes(self, num_prompts: int, vocab_size: int) -> list[LogprobWish | None]:
        """By prompt; None: no logprobs."""

        def each(field: str) -> list[Any]:
            value = getattr(self, field)
            if not isinstance(value, list):
                return [value] * num_prompts
            if len(value) != num_prompts:
                raise InvalidRequest(f"{field} must hold {num_prompts} values, not {len(value)}.", param=field)
            return value

        flags = [value is not None and check_bool(value, "return_logprob") for value in each("return_logprob")]
        starts = [_count(value, "logprob_start_len", NO_INPUT_LOGPROBS) for value in each("logprob_start_len")]
        tops = [_count(value, "top_logprobs_num", 0) for value in each("top_logprobs_num")]
        ids = self._token_ids(num_prompts, vocab_size)
        columns = zip(flags, starts, tops, ids, strict=True)
        return [LogprobWish(start, top, wanted) if flag else None for flag, start, top, wanted in columns]

    def _token_ids(self, num_prompts: int, vocab_size: int) -> list[tuple[int, ...]]:
        value = self.token_ids_logprob
        if value is None:
            return [()] * num_prompts
        if not isinstance(value, list):
            raise refusal("token_ids_logprob", value, "a list of token ids, or of lists of them")

        def checked(ids: Any, param: str) -> tuple[int, ...]:
            return () if ids is None else check_token_ids(ids, param, vocab_size, max_length=vocab_size)

        if not any(isinstance(item, list) for item in value):
            return [checked(value, "token_ids_logprob")] * num_prompts
        if len(value) != num_prompts:
            raise InvalidRequest(
                f"token_ids_logprob must hold {num_prompts} lists, not {len(value)}.", param="token_ids_logprob"
            )
        return [checked(ids, f"token_ids_logprob[{index}]") for index, ids in enumerate(value)]


def num_logprobs(wishes: list[LogprobWish | None]) -> tuple[int | None, int | None]:
    """What the engine must compute for all of them: of the output, of the prompts."""
    wanted = [wish for wish in wishes if wish is not None]
    if not wanted:
        return None, None
    width = ALL_LOGPROBS if any(wish.token_ids for wish in wanted) else max(wish.num_top for wish in wanted)
    return width, width if any(wish.start >= 0 for wish in wanted) else None


def _count(value: Any, param: str, default: int) -> int:
    return default if value is None else check_int(value, param, default, INT32_MAX)
