"""The Jinja environment of chat templates: transformers' extensions and functions, in a sandbox with bounds on size.

Used by `chat_template.py` alone. transformers/utils/chat_template_utils.py (Apache-2.0) is the model for what templates
may use. The bounds are ours: the usual ways to build a huge text in one expression (`*`, `+`, `~`, `**`, formatting,
padding) are refused before they allocate. They are a guard against accidents and simple malice, not a memory limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 16 * 1024 * 1024
_MAX_EXPONENT_BITS = 4096
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"})


class RenderTooLarge(jinja2.TemplateError):
    """The template builds more text than any prompt could be."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  (the extension interface of Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _BoundedConcat(CodeGenerator):
    """Compiles `a ~ b` to a call that looks at the size first."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with what chat templates call."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _BoundedConcat

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        for name in ("center", "indent", "format"):
            self.filters[name] = _bounded(self.filters[name])
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _check_size(len(sequence) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > _MAX_EXPONENT_BITS:
                raise RenderTooLarge(f"a power of more than {_MAX_EXPONENT_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_widths(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template. Methods of strings that pad or format are looked at first."""
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and getattr(method, "__name__", "") in _PADDING_METHODS:
            _check_widths(owner, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def concat_texts(self, parts: tuple[Any, ...]) -> str:
        """What `~` does."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` that keeps names of Python's internals out."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace cannot hold {name!r}: the name begins with an underscore"
            )
        super().__setitem__(name, value)


def iterates_content(tree: nodes.Template) -> bool:
    """Whether the template needs a message's content as a list of parts: it loops over it and knows no string.

    The idea is vLLM's content-format detection. A name counts as the content if it is called so (a macro's parameter)
    or is assigned from `message.content`.
    """
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    knows_strings = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return loops and not knows_strings


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise RenderTooLarge(f"an expression makes {size} items; {MAX_RENDERED_CHARS} are allowed")


def _check_widths(text: str, arguments: tuple[Any, ...]) -> None:
    """Refuses huge widths, in a format string or as arguments beside it."""
    widths = [int(digits) for digits in re.findall(r"[0-9]{5,18}", text)] if "%" in text or "{" in text else []
    widths += [argument for argument in arguments if isinstance(argument, int)]
    _check_size(max(widths, default=0) * (text.count("\n") + 1))


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_widths(str(value), (*args, *kwargs.values()))
        return filter_(value, *args, **kwargs)

    return bounded


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Like transformers' filter: Jinja's own would escape HTML."""
    if isinstance(indent, int):
        _check_size(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
