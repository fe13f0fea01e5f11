"""Body of POST /v1/embeddings: OpenAI's fields, and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.processing.inputs import ChatInput
from headrace.server.protocol.common import RequestModel, check_queue_fields
from headrace.server.protocol.completions import PROMPT


class EmbeddingRequest(RequestModel):
    """Texts, or one conversation. Vector i belongs to the i-th of `input`."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "prompt_embeds": "inputs are text or token ids.",
        "lora_request": "there are no adapters in this version.",
        "mm_processor_kwargs": "inputs are text or token ids.",
    }

    model: str | None = Field(None, description="A served name; absent: the first one.")
    input: Annotated[Any, WithJsonSchema(PROMPT)] = Field(
        None, description="A string, a list of strings, a list of token ids, or a list of such lists."
    )
    messages: list[dict[str, Any]] | None = Field(None, description="A conversation, in place of input.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float (default): numbers; base64: their float32 bytes, little-endian."
    )
    dimensions: int | None = Field(
        None,
        description="Keep that many numbers, the first ones, and scale them anew: for models that were trained so.",
    )
    pooling: Literal["last", "mean"] | None = Field(
        None, description="The hidden state of the last token, or the mean of all tokens'. Default: --pooling."
    )
    normalize: bool | None = Field(None, description="Scale to length 1. Default true.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep that many of an input's tokens, the last ones; -1: as many as the context holds."
    )
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own, such as BOS.")
    add_generation_prompt: bool | None = Field(None, description="Of messages. Default false.")
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = None
    embed_dtype: Literal["float32"] | None = Field(None, description="The only one.")
    endianness: Literal["native", "little"] | None = Field(None, description="Of base64; both mean little.")
    request_id: str | None = Field(None, description="At most 128 printable characters; part of the reply's id.")
    priority: int | None = Field(None, description="Lower runs earlier. Default 0.")
    cache_salt: str | None = Field(None, description="Prefix cache entries are shared only under the same salt.")
    timeout_s: float | None = Field(None, description="Deadline in seconds, waiting included; then 504.")
    user: str | None = Field(None, description="Accepted, without effect.")

    @property
    def names(self) -> dict[str, str]:
        return {"prompt": "input" if self.messages is None else "messages", "n": "input"}

    def check(self) -> None:
        check_queue_fields(self)
        if self.messages is not None and self.input is not None:
            raise InvalidRequest("input and messages must not both be given.", param="messages")

    def source(self) -> ChatInput | list[Any]:
        """What `processing/inputs.py` looks at more closely."""
        if self.messages is not None:
            return ChatInput(
                messages=self.messages,
                add_generation_prompt=bool(self.add_generation_prompt),
                continue_final_message=bool(self.continue_final_message),
                chat_template=self.chat_template,
                template_kwargs=self.chat_template_kwargs,
            )
        value = self.input
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise refusal("input", value, "a string, a list of strings, a list of token ids or a list of such lists")
        return value if isinstance(value[0], str | list) else [value]
