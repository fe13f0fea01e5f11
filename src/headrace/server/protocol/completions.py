"""Body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.server.protocol.common import STRINGS, TOKEN_LISTS, GenerationRequest
from headrace.types import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's for this route
PROMPT = {"anyOf": [*STRINGS["anyOf"], *TOKEN_LISTS["anyOf"]]}


class CompletionRequest(GenerationRequest):
    """One or more prompts to continue. Choice c belongs to prompt c // n. `max_tokens` is 16 when absent."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.UNSUPPORTED,
        "suffix": "the served models do not fill in the middle; remove the field.",
    }

    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = Field(
        None, description="A string, a list of strings, a list of token ids, or a list of such lists."
    )
    prompt_token_ids: Annotated[Any, WithJsonSchema(TOKEN_LISTS)] = Field(None, description="Wins over prompt.")
    logprobs: int | None = Field(None, description="Log probabilities of each token and the N most likely.")
    best_of: int | None = Field(None, description="Only the value of n.")

    @property
    def names(self) -> dict[str, str]:
        return {} if self.prompt_token_ids is None else {"prompt": "prompt_token_ids"}

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """With echo, logprobs are wanted of the prompt's tokens too."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = self.logprobs if prompt_logprobs is None else _wider(prompt_logprobs, self.logprobs)
        return self.sampling_params(defaults, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)

    def check(self) -> None:
        self.check_common()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(
                f"best_of must equal n ({self.n or 1}), not {self.best_of}.", param="best_of", code="unsupported_field"
            )

    def source(self) -> list[Any]:
        """The prompts, each a string or a list of token ids (looked at more closely by `processing/inputs.py`)."""
        field = "prompt" if self.prompt_token_ids is None else "prompt_token_ids"
        value = self.prompt if self.prompt_token_ids is None else self.prompt_token_ids
        if isinstance(value, str) and field == "prompt":
            return [value]
        if not isinstance(value, list) or not value:
            raise refusal(field, value, "a string, a list of strings, a list of token ids or a list of such lists")
        if isinstance(value[0], str | list):
            return value
        return [value]


def _wider(first: int, second: int) -> int:
    return -1 if -1 in (first, second) else max(first, second)
