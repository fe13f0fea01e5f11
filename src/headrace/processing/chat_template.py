"""Renders chat messages to the text that a model was trained on, with the model's own Jinja template.

Called by the input processor and the offline `LLM`, in a thread when the conversation is long. The result is that of
transformers' `apply_chat_template` (5.x): same environment, same rules for what a template sees. Templates are
untrusted: they run in Jinja's immutable sandbox, with bounds on what they may produce; they have no bound on time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from headrace.errors import InvalidRequest
from headrace.processing.template_environment import (
    MAX_RENDERED_CHARS,
    RenderTooLarge,
    TemplateEnvironment,
    iterates_content,
)
from headrace.processing.template_messages import prepare_messages, tag_final_message, untag

ASKS_FOR_NULL = re.compile(r"content(['\"]\])?\s+is\s+none")
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "conversations", "chat_template"})


class ChatTemplate:
    """A compiled template. Rendering is safe from several threads at once."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source` takes the place of `source` when a request brings tools.

        Raises InvalidRequest(param="chat_template").
        """
        self.source = source
        self.tool_source = tool_source if tool_source is not None else source
        self._tokens = dict(special_tokens or {})
        if bos_token is not None:
            self._tokens["bos_token"] = bos_token
        if eos_token is not None:
            self._tokens["eos_token"] = eos_token
        environment = TemplateEnvironment()
        self._plain = _Compiled(environment, source)
        self._with_tools = _Compiled(environment, tool_source) if tool_source is not None else self._plain

    @classmethod
    def of_named(cls, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """From a model's named templates: `default`, or the only one; `tool_use` for requests with tools."""
        default = templates.get("default")
        if default is None and len(templates) == 1:
            default = next(iter(templates.values()))
        if default is None:
            return None
        return cls(default, special_tokens=special_tokens, tool_source=templates.get("tool_use"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `kwargs` are the template's own variables (enable_thinking, ...). Raises InvalidRequest."""
        extra = dict(kwargs or {})
        documents = extra.pop("documents", documents)
        if clash := sorted(RESERVED & extra.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {', '.join(clash)}: the request's own fields do.",
                param="chat_template_kwargs",
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true: the first continues the last "
                "message, the second begins a new one.",
                param="continue_final_message",
            )
        compiled = self._with_tools if tools is not None else self._plain
        chat = prepare_messages(messages, wants_parts=compiled.wants_parts, wants_null=compiled.wants_null)
        final = tag_final_message(chat) if continue_final_message else None
        variables = {**self._tokens, **extra}
        variables |= {
            "messages": chat,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None if documents is None else [dict(document) for document in documents],
            "add_generation_prompt": add_generation_prompt,
        }
        text = compiled.render(variables)
        return text if final is None else untag(text, final)


class _Compiled:
    """One source, compiled, and what it expects of a message's content."""

    def __init__(self, environment: TemplateEnvironment, source: str) -> None:
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}", param="chat_template"
            ) from None
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise InvalidRequest(f"the chat template does not compile: {error}", param="chat_template") from None
        self.wants_parts = iterates_content(tree)
        self.wants_null = ASKS_FOR_NULL.search(source) is not None

    def render(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise RenderTooLarge(f"the rendered text is longer than {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except Exception as error:  # a template may fail in any way: it is a program over what the user sent
            # Jinja's own errors carry the template's message (raise_exception); of others the kind says more.
            detail = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise InvalidRequest(
                f"the chat template refused these messages: {detail[:1000]}", param="messages", code="template_error"
            ) from None
        return "".join(parts)
