"""Body of POST /inference/v1/generate, vLLM's route for token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_int, check_name, check_text, refusal
from headrace.server.protocol.common import (
    INT32_MAX,
    TOKEN_IDS,
    UNSUPPORTED_EVERYWHERE,
    GenerationRequest,
    RequestModel,
    StreamOptions,
)

SAMPLING = "sampling_params"
DEFAULT_MAX_TOKENS = 16  # vLLM's
NOT_SAMPLING = (
    "model", "stream", "stream_options", "echo", "request_id", "priority", "cache_salt", "timeout_s",
    "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids",
)  # fmt: skip


class TokenSampling(GenerationRequest):
    """`sampling_params` with vLLM's names."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **UNSUPPORTED_EVERYWHERE,
        "logprob_token_ids": "use logprobs.",
        "prompt_logprob_token_ids": "use prompt_logprobs.",
        "extra_args": "there are none.",
    }

    logprobs: int | None = None
    detokenize: bool | None = Field(None, description="Accepted, without effect: text is not returned.")
    output_kind: int | None = Field(None, description="Accepted, without effect.")

    def unknown_fields(self) -> list[str]:
        """What other routes take belongs beside `sampling_params`, or nowhere: it is reported, not ignored."""
        misplaced = [name for name in sorted(NOT_SAMPLING) if getattr(self, name) is not None]
        return [*super().unknown_fields(), *misplaced]


class TokenGenerateRequest(RequestModel):
    """Token ids to continue."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "features": "the served model reads text alone.",
        "kv_transfer_params": "prefill and decode are not apart.",
    }

    token_ids: Annotated[Any, WithJsonSchema(TOKEN_IDS)] = None
    sampling_params: dict[str, Any] | None = Field(None, description="vLLM's names; max_tokens is 16 when absent.")
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: str | None = Field(None, description="Accepted, without effect: the reply is token ids.")
    cache_salt: str | None = None
    priority: int | None = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is allowed only with stream: true.", param="stream_options")
        if self.priority is not None:
            check_int(self.priority, "priority", -INT32_MAX, INT32_MAX)
        if self.cache_salt is not None:
            check_text(self.cache_salt, "cache_salt", max_chars=256)
        if self.request_id is not None:
            check_name(self.request_id, "request_id")
        if not isinstance(self.token_ids, list):
            raise refusal("token_ids", self.token_ids, "a list of token ids")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)
