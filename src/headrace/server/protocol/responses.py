"""Body of POST /v1/responses, OpenAI's newer route, and what it becomes for the chat path.

`input` is a string or items: messages, calls, results of calls, thoughts. A previous response brings its own
conversation (`server/response_store.py`), in the chat form, in front of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_name, check_text, refusal
from headrace.processing.inputs import ChatInput, PreparedRequest
from headrace.processing.parsing import Parsing, ReplyParsing
from headrace.processing.structured import Found, either, format_of
from headrace.processing.tools.forced import tool_choice_grammar
from headrace.server.protocol.chat import REASONING_EFFORTS
from headrace.server.protocol.common import RequestModel
from headrace.server.protocol.content import function, text_parts, tool_call, unsupported_block
from headrace.types import SamplingParams

Message = dict[str, Any]
INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
TEXT = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
INCLUDE = (LOGPROBS, "reasoning.encrypted_content")  # thoughts are in the open: the second changes nothing
ROLES = ("user", "assistant", "system", "developer")
MAX_LABEL_CHARS = 512
MAX_METADATA, MAX_METADATA_NAME = 16, 64
TOOL_CHOICES = "none, auto, required or {type: function, name}"
SUMMARIES = ("auto", "concise", "detailed")


class ResponsesRequest(RequestModel):
    """A conversation to answer; the answer is kept for `previous_response_id` unless `store` is false."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "conversation": "use previous_response_id.",
        "prompt": "there are no stored prompts; send the input.",
        "context_management": "a prompt is never edited here.",
        "moderation": "nothing is moderated.",
    }

    model: str | None = Field(None, description="A served name; absent: the first one.")
    input: Annotated[Any, WithJsonSchema(INPUT)] = Field(None, description="A text, or items.")
    instructions: str | None = Field(None, description="A system message, of this response alone.")
    previous_response_id: str | None = Field(None, description="A response that is kept here; it is continued.")
    max_output_tokens: int | None = Field(None, description="Most tokens to generate, thoughts included.")
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, description="Accepted, without effect.")
    store: bool | None = Field(None, description="Default true: kept in memory, as --response-store-bytes allows.")
    background: bool | None = Field(None, description="Only false.")
    include: list[str] | None = Field(None, description=f"{LOGPROBS}.")
    top_logprobs: int | None = Field(None, description=f"Needs include: [{LOGPROBS}].")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions.")
    tool_choice: Any = Field(None, description="none (calls stay text), auto, required, or {type: function, name}.")
    parallel_tool_calls: bool | None = Field(None, description="false: calls after the first are left out.")
    max_tool_calls: int | None = Field(None, description="Accepted: no tool runs here.")
    reasoning: dict[str, Any] | None = Field(None, description="effort is given to the template; thoughts come whole.")
    text: dict[str, Any] | None = Field(
        None, description="{format: {type: text}}, json_object, or json_schema with name and schema, which is kept to."
    )
    truncation: str | None = Field(None, description="Only disabled.")
    metadata: dict[str, str] | None = Field(None, description="Comes back with the response.")
    user: str | None = Field(None, description="Accepted, without effect.")
    service_tier: str | None = Field(None, description="Accepted, without effect.")
    safety_identifier: str | None = Field(None, description="Accepted, without effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted, without effect: prefixes are found by content.")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """What is no part of the conversation."""
        if self.background:
            raise InvalidRequest(
                "background must be false: a response is made while its sender waits.",
                param="background",
                code="unsupported_field",
            )
        for index, value in enumerate(self.include or ()):
            if value not in INCLUDE:
                raise refusal(f"include[{index}]", value, "one of " + ", ".join(INCLUDE), code="unsupported_field")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(f"top_logprobs needs include: [{LOGPROBS}].", param="top_logprobs")
        if self.truncation not in (None, "disabled"):
            raise refusal("truncation", self.truncation, "disabled", code="unsupported_field")
        if self.previous_response_id is not None:
            check_name(self.previous_response_id, "previous_response_id")
        self._check_labels()
        self._check_reasoning()

    def _check_labels(self) -> None:
        """What comes back with the response, in every event that holds it; with OpenAI's limits where it has some."""
        for field in ("user", "safety_identifier", "prompt_cache_key", "service_tier"):
            if (value := getattr(self, field)) is not None:
                check_text(value, field, max_chars=MAX_LABEL_CHARS, allow_empty=True)
        if len(self.metadata or {}) > MAX_METADATA:
            raise refusal("metadata", self.metadata, f"an object of at most {MAX_METADATA} pairs")
        for name, text in (self.metadata or {}).items():
            if len(name) > MAX_METADATA_NAME:
                raise refusal("metadata", name, f"an object whose names have at most {MAX_METADATA_NAME} characters")
            check_text(text, f"metadata.{name}", max_chars=MAX_LABEL_CHARS, allow_empty=True)

    def reply_grammar(self, parsing: Parsing) -> Found | None:
        """What the answer must match: a form that was asked for, or tool calls."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        elif choice not in (None, "none", "auto", "required"):
            raise refusal("tool_choice", choice, TOOL_CHOICES, code="unsupported_field")
        is_parallel = self.parallel_tool_calls is not False
        forced = tool_choice_grammar(self._functions(), choice, parsing.tools, is_parallel=is_parallel)
        return either(format_of((self.text or {}).get("format"), "text.format"), forced)

    def _check_reasoning(self) -> None:
        reasoning = self.reasoning or {}
        if (effort := reasoning.get("effort")) is not None and effort not in REASONING_EFFORTS:
            raise refusal("reasoning.effort", effort, "one of " + ", ".join(REASONING_EFFORTS))
        if (summary := reasoning.get("summary")) is not None and summary not in SUMMARIES:
            raise refusal("reasoning.summary", summary, "one of " + ", ".join(SUMMARIES))

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """As the request says it; not validated yet."""
        fields = {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(
            **{**defaults, **given}, logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None
        )

    def messages(self) -> list[Message]:
        """`input` as chat messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not isinstance(self.input, list) or not self.input:
            raise refusal("input", self.input, "a string or a non-empty list of items")
        return messages_of(self.input)

    def source(self, messages: Sequence[Message]) -> ChatInput:
        """`messages`: the whole conversation but the instructions."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        effort = (self.reasoning or {}).get("effort")
        return ChatInput(
            messages=[*system, *messages],
            tools=self._functions(),
            template_kwargs={} if effort is None else {"reasoning_effort": effort},
        )

    def parsing(self, parsing: Parsing, prepared: PreparedRequest, source: ChatInput) -> ReplyParsing | None:
        """How the answer is taken apart."""
        assert prepared.texts[0] is not None, "a conversation is rendered"
        return parsing.of_request(
            prepared.texts[0],
            template_kwargs=source.template_kwargs,
            tools=None if self.tool_choice == "none" else source.tools,
            is_parallel=self.parallel_tool_calls is not False,
        )

    def _functions(self) -> list[dict[str, Any]] | None:
        return [_function(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)] if self.tools else None


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise refusal(f"{path}.type", kind, "function (other tools run at OpenAI)", code="unsupported_field")
    name, parameters = check_text(tool.get("name"), f"{path}.name", max_chars=128), tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise refusal(f"{path}.parameters", parameters, "a JSON schema")
    if tool.get("description") is not None:
        check_text(tool["description"], f"{path}.description", allow_empty=True)
    return function(name, tool.get("description"), parameters)


def messages_of(items: Sequence[Any]) -> list[Message]:
    """Items as chat messages. Thoughts and calls join the assistant's message that they belong to."""
    messages: list[Message] = []
    thoughts = ""
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            raise refusal(path, item, "an object")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item, path))
        elif kind == "function_call":
            _assistant(messages, thoughts).setdefault("tool_calls", []).append(_call(item, path))
        elif kind == "function_call_output":
            messages.append(_result(item, path))
        elif kind != "reasoning":
            raise unsupported_block(check_text(kind, f"{path}.type"), path)
        if kind == "reasoning":
            thoughts = _thoughts(item, path)
        else:
            if thoughts and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return messages


def _message(item: Message, path: str) -> Message:
    role = item.get("role")
    if role not in ROLES:
        raise refusal(f"{path}.role", role, "one of " + ", ".join(ROLES))
    content = item.get("content")
    if isinstance(content, list):
        content = [_as_text(part) for part in content]
    return {"role": role, "content": text_parts(content, f"{path}.content", TEXT)}


def _as_text(part: Any) -> Any:
    """A refusal is what the assistant has said."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "output_text", "text": part.get("refusal")}
    return part


def _assistant(messages: list[Message], thoughts: str) -> Message:
    """The message that a call belongs to: the last one, unless new thoughts came after it."""
    if not messages or messages[-1]["role"] != "assistant" or thoughts:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call(item: Message, path: str) -> Message:
    call_id, name = (check_text(item.get(field), f"{path}.{field}") for field in ("call_id", "name"))
    arguments = check_text(item.get("arguments"), f"{path}.arguments", allow_empty=True)
    return tool_call(call_id, name, arguments)


def _result(item: Message, path: str) -> Message:
    call_id = check_text(item.get("call_id"), f"{path}.call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": text_parts(item.get("output"), f"{path}.output", TEXT)}


def _thoughts(item: Message, path: str) -> str:
    """The thoughts themselves, or where there are none what sums them up."""
    texts: list[str] = []
    for field in ("content", "summary"):
        parts = item.get(field)
        if parts is None or texts:
            continue
        if not isinstance(parts, list):
            raise refusal(f"{path}.{field}", parts, "a list of parts")
        for index, part in enumerate(parts):
            if not isinstance(part, dict):
                raise refusal(f"{path}.{field}[{index}]", part, "an object with text")
            texts.append(check_text(part.get("text"), f"{path}.{field}[{index}].text", allow_empty=True))
    return "".join(texts)
