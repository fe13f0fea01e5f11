"""Body of POST /v1/chat/completions. What the messages hold is checked by `processing/messages.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_int, refusal
from headrace.processing.inputs import ChatInput, PreparedRequest
from headrace.processing.messages import check_named_function
from headrace.processing.parsing import Parsing, ReplyParsing
from headrace.processing.structured import Found, either
from headrace.processing.tools.forced import tool_choice_grammar
from headrace.server.protocol.common import INT32_MAX, TOKEN_IDS, GenerationRequest
from headrace.types import SamplingParams

THINKING_FIELDS = ("reasoning_max_tokens", "thinking_token_budget", "thinking_budget")
"""FastDeploy's, vLLM's and Qwen's name for the same."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
            },
        },
    },
}


class ChatCompletionRequest(GenerationRequest):
    """A conversation to answer. `tools` are rendered into the template, calls come back in the format of OpenAI."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **{field: why for field, why in GenerationRequest.UNSUPPORTED.items() if field not in THINKING_FIELDS},
        "functions": "use tools.",
        "function_call": "use tools with tool_choice none or auto.",
        "audio": "only text is available.",
        "web_search_options": "there is no search.",
        "documents": "put them into the messages.",
        "mm_processor_kwargs": "only text is available.",
    }

    messages: Annotated[Any, WithJsonSchema(MESSAGES)] = Field(None, description="The conversation so far.")
    prompt_token_ids: Annotated[Any, WithJsonSchema(TOKEN_IDS)] = Field(
        None, description="The rendered prompt as token ids; the messages are not read then."
    )
    max_completion_tokens: int | None = Field(None, description="Wins over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="Needs logprobs: true.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Any = Field(
        None, description="none (calls stay text), auto, required, or {type: function, function: {name}}."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: calls after the first are left out.")
    modalities: list[str] | None = Field(None, description="Only [text].")
    chat_template: str | None = Field(None, description="Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = Field(None, description="Given to the template as reasoning_effort.")
    reasoning_max_tokens: int | None = Field(None, description="Thoughts are ended after this many tokens; 0: at once.")
    thinking_token_budget: int | None = Field(None, description="reasoning_max_tokens under vLLM's name.")
    thinking_budget: int | None = Field(None, description="reasoning_max_tokens under Qwen's name.")
    include_reasoning: bool | None = Field(None, description="false: thoughts are left out of the reply.")

    @property
    def names(self) -> dict[str, str]:
        """Sampling parameter -> what this request calls it."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        prompt = "messages" if self.prompt_token_ids is None else "prompt_token_ids"
        return {"prompt": prompt, "max_tokens": limit, "logprobs": "top_logprobs"}

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling_params(defaults, max_tokens=limit, logprobs=logprobs)

    def check(self) -> None:
        self.check_common()
        for index, tool in enumerate(self.tools or ()):
            check_named_function(tool, f"tools[{index}]")
        if self.modalities not in (None, ["text"]):
            raise _unsupported("modalities", None, self.modalities, '["text"]')
        if self.reasoning_effort is not None and self.reasoning_effort not in REASONING_EFFORTS:
            raise refusal("reasoning_effort", self.reasoning_effort, "one of " + ", ".join(REASONING_EFFORTS))

    def max_thinking(self) -> tuple[int, str] | None:
        """Most tokens of thoughts, and the field that says so."""
        given = [(value, field) for field in THINKING_FIELDS if (value := getattr(self, field)) is not None]
        for value, field in given:
            check_int(value, field, 0, INT32_MAX)
            if value != given[0][0]:
                raise InvalidRequest(f"{given[0][1]} and {field} mean the same, but differ.", param=field)
        return given[0] if given else None

    def reply_grammar(self, parsing: Parsing) -> Found | None:
        """What the reply must match: a form that was asked for, or tool calls."""
        is_parallel = self.parallel_tool_calls is not False
        forced = tool_choice_grammar(self.tools, self.tool_choice, parsing.tools, is_parallel=is_parallel)
        return either(self.grammar(), forced)

    def echo_texts(self) -> tuple[str, ...]:
        """With echo, the text of a last message of the assistant's comes before the answer, as in vLLM."""
        last = self.messages[-1] if self.echo and isinstance(self.messages, list) and self.messages else None
        if not isinstance(last, dict) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            return ()
        return (last["content"],)

    def parsing(self, parsing: Parsing, prepared: PreparedRequest) -> ReplyParsing | None:
        """How the answer is taken apart."""
        continued = None
        if self.continue_final_message and self.prompt_token_ids is None:
            content = self.messages[-1].get("content")
            continued = content if isinstance(content, str) else None
        reply = parsing.of_request(
            prepared.texts[0] if prepared.texts[0] is not None else prepared.submit.prompts[0],
            continued=continued,
            template_kwargs=self.chat_template_kwargs,
            tools=None if self.tool_choice == "none" else self.tools,
            is_parallel=self.parallel_tool_calls is not False,
        )
        return reply if reply is None else replace(reply, shows_reasoning=self.include_reasoning is not False)

    def source(self) -> ChatInput | list[Any]:
        if self.prompt_token_ids is not None:
            if not isinstance(self.prompt_token_ids, list):
                raise refusal("prompt_token_ids", self.prompt_token_ids, "a list of token ids")
            return [self.prompt_token_ids]
        if not isinstance(self.messages, list) or not self.messages:
            raise refusal("messages", self.messages, "a non-empty list of messages")
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return ChatInput(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            chat_template=self.chat_template,
            template_kwargs=kwargs,
        )


def _unsupported(field: str, key: str | None, value: Any, allowed: str) -> InvalidRequest:
    error = refusal(f"{field}.{key}" if key else field, value, allowed, code="unsupported_field")
    error.param = field
    return error
