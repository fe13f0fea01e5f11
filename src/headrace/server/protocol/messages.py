"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and what they become for the chat path.

Text, tools and thoughts pass through the same template and the same parsers as on /v1/chat/completions. A last message
of the assistant's is continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_bool, check_int, check_text, refusal
from headrace.processing.inputs import ChatInput, PreparedRequest
from headrace.processing.parsing import Parsing, ReplyParsing
from headrace.processing.structured import Found, either, format_of
from headrace.processing.tools.forced import tool_choice_grammar
from headrace.server.protocol.chat import REASONING_EFFORTS
from headrace.server.protocol.common import INT32_MAX, RequestModel
from headrace.server.protocol.content import (
    block_type,
    function,
    joined,
    text_part,
    text_parts,
    tool_call,
    unsupported_block,
)
from headrace.types import SamplingParams

TEXT = ("text",)
MESSAGES = {"type": "array", "items": {"type": "object", "required": ["role", "content"]}}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
SAME_NAME = ("max_tokens", "temperature", "top_p", "top_k")


class CountTokensRequest(RequestModel):
    """A conversation in Anthropic's form."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "container": "there are no containers.",
        "mcp_servers": "tools are called by the client.",
        "context_management": "a prompt is never edited here.",
    }

    model: str | None = Field(None, description="A served name; absent: the first one.")
    messages: Annotated[Any, WithJsonSchema(MESSAGES)] = None
    system: Annotated[Any, WithJsonSchema(CONTENT)] = Field(None, description="A text or text blocks.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions with an input_schema.")
    tool_choice: dict[str, Any] | None = Field(None, description="Of type auto, any, tool or none.")
    thinking: dict[str, Any] | None = Field(
        None,
        description="enabled, adaptive or disabled; thoughts are ended after budget_tokens.",
    )
    output_config: dict[str, Any] | None = Field(None, description="effort; format: {type: json_schema, schema}.")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted, without effect: prefixes are found.")

    def source(self) -> ChatInput:
        """The conversation as the chat path takes it."""
        if not isinstance(self.messages, list) or not self.messages:
            raise refusal("messages", self.messages, "a non-empty list of messages")
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": text_parts(self.system, "system", TEXT)})
        for index, message in enumerate(self.messages):
            messages.extend(_messages(message, f"messages[{index}]"))
        is_continued = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        return ChatInput(
            messages=messages,
            tools=self._functions(),
            continue_final_message=is_continued,
            template_kwargs=self._template_kwargs(),
        )

    def parsing(self, parsing: Parsing, prepared: PreparedRequest, source: ChatInput) -> ReplyParsing | None:
        """How the answer is taken apart."""
        assert prepared.texts[0] is not None, "a conversation is rendered"
        choice = self.tool_choice or {}
        return parsing.of_request(
            prepared.texts[0],
            continued=joined(source.messages[-1]["content"]) if source.continue_final_message else None,
            template_kwargs=source.template_kwargs,
            tools=None if choice.get("type") == "none" else source.tools,
            is_parallel=choice.get("disable_parallel_tool_use") is not True,
        )

    def check(self, *, has_reasoning: bool) -> None:
        """What is no part of the conversation."""
        self._check_thinking(has_reasoning)
        choice = self.tool_choice or {}
        if (kind := choice.get("type", "auto")) not in ("auto", "any", "tool", "none"):
            raise refusal("tool_choice.type", kind, "auto, any, tool or none")
        if choice.get("disable_parallel_tool_use") is not None:
            check_bool(choice["disable_parallel_tool_use"], "tool_choice.disable_parallel_tool_use")
        config = self.output_config or {}
        effort = config.get("effort")
        if effort is not None and (not isinstance(effort, str) or effort not in (*REASONING_EFFORTS, "max")):
            raise refusal("output_config.effort", effort, "one of " + ", ".join((*REASONING_EFFORTS, "max")))

    def reply_grammar(self, parsing: Parsing) -> Found | None:
        """What the answer must match: a form that was asked for, or tool calls. `check` has been called."""
        choice = self.tool_choice or {}
        kind, is_parallel = choice.get("type", "auto"), choice.get("disable_parallel_tool_use") is not True
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else None
        if kind == "any":
            chosen = "required"
        forced = tool_choice_grammar(self._functions(), chosen, parsing.tools, is_parallel=is_parallel)
        form = (self.output_config or {}).get("format")
        return either(format_of(form, "output_config.format", ("json_schema",)), forced)

    def max_thinking(self) -> tuple[int, str] | None:
        """Most tokens of thoughts, and the field that says so. `check` has been called."""
        thinking = self.thinking or {}
        budget: int | None = thinking.get("budget_tokens")
        return None if budget is None or thinking["type"] == "disabled" else (budget, "thinking.budget_tokens")

    def _check_thinking(self, has_reasoning: bool) -> None:
        if self.thinking is None:
            return
        kind = self.thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise refusal("thinking.type", kind, "enabled, adaptive or disabled")
        if self.thinking.get("budget_tokens") is not None:
            check_int(self.thinking["budget_tokens"], "thinking.budget_tokens", 1, INT32_MAX)
        if kind == "enabled" and not has_reasoning:
            raise InvalidRequest(
                "thinking.type must be adaptive or disabled, not enabled: the served model's thoughts cannot be told "
                "from its answer (see --reasoning-parser).",
                param="thinking.type",
                code="unsupported_field",
            )

    def _template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if self.thinking is not None and self.thinking["type"] != "adaptive":
            is_on = self.thinking["type"] == "enabled"
            kwargs |= {"enable_thinking": is_on, "thinking": is_on}  # the names that templates know
        if (effort := (self.output_config or {}).get("effort")) is not None:
            kwargs["reasoning_effort"] = effort
        return kwargs

    def _functions(self) -> list[dict[str, Any]] | None:
        if not self.tools:
            return None
        return [_function(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)]


class MessagesRequest(CountTokensRequest):
    """A conversation to answer, in Anthropic's form."""

    max_tokens: int = Field(description="Most tokens to generate, thoughts included.")
    stop_sequences: list[str] | None = Field(None, description="Strings that end the output; not part of it.")
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect.")
    service_tier: str | None = Field(None, description="Accepted, without effect.")

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """As the request says it; not validated yet."""
        given = {name: getattr(self, name) for name in SAME_NAME if getattr(self, name) is not None}
        return SamplingParams(**{**defaults, **given}, stop=tuple(self.stop_sequences or ()))


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise refusal(f"{path}.type", kind, "custom (other tools run at Anthropic)", code="unsupported_field")
    name = check_text(tool.get("name"), f"{path}.name", max_chars=128)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise refusal(f"{path}.input_schema", schema, "a JSON schema")
    description = tool.get("description")
    if description is not None:
        check_text(description, f"{path}.description", allow_empty=True)
    return function(name, description, schema)


def _messages(message: Any, path: str) -> list[dict[str, Any]]:
    """One message as chat has it: results of tools are messages of their own there, before the rest of a user's."""
    if not isinstance(message, dict):
        raise refusal(path, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refusal(f"{path}.role", role, "user or assistant")
    path = f"{path}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise refusal(path, content, "a string or a non-empty list of blocks")
    if role == "assistant":
        return [_assistant(content, path)]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        if block_type(block, at) == "tool_result" and role == "user":
            results.append(_result(block, at))
        else:
            parts.append(text_part(block, at, TEXT))
    return [*results, {"role": role, "content": parts}] if parts else results


def _result(block: dict[str, Any], path: str) -> dict[str, Any]:
    call_id = check_text(block.get("tool_use_id"), f"{path}.tool_use_id")
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": "" if content is None else text_parts(content, f"{path}.content", TEXT),
    }


def _assistant(content: list[Any], path: str) -> dict[str, Any]:
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        kind = block_type(block, at)
        if kind == "text":
            parts.append(text_part(block, at, TEXT))
        elif kind == "thinking":
            thoughts.append(check_text(block.get("thinking"), f"{at}.thinking", allow_empty=True))
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif kind != "redacted_thinking":  # thoughts that nobody here can read
            raise unsupported_block(kind, at)
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise refusal(f"{path}.input", arguments, "an object")
    call_id, name = (check_text(block.get(name), f"{path}.{name}") for name in ("id", "name"))
    return tool_call(call_id, name, msgspec.json.encode(arguments).decode())
