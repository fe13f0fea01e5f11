"""Bodies of POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.processing.inputs import ChatInput
from headrace.server.protocol.chat import MESSAGES
from headrace.server.protocol.common import TOKEN_IDS, RequestModel


class TokenizeRequest(RequestModel):
    """A text, or a conversation to render and tokenise: one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema(MESSAGES)] = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool | None = Field(None, description="Also the text of each token.")
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def source(self) -> ChatInput | str:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Exactly one of prompt and messages must be given.", param="prompt")
        if self.prompt is not None:
            return self.prompt
        if not isinstance(self.messages, list) or not self.messages:
            raise refusal("messages", self.messages, "a non-empty list of messages")
        return ChatInput(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            chat_template=self.chat_template,
            template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(RequestModel):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(TOKEN_IDS)]
    skip_special_tokens: bool | None = Field(None, description="Default false.")
