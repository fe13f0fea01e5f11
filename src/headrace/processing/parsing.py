"""Which parsers take chat replies apart: chosen once per front end, made once per choice.

`--reasoning-parser` and `--tool-parser` name them, or the chat template tells (`auto`). `--plugin FILE` adds own ones:
the file defines `register(registry)`, which calls `registry.add_reasoning(name, cls)` and `registry.add_tools(name,
cls)` with classes like those in `reasoning/` and `tools/`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from headrace.config.options import ParsingConfig
from headrace.errors import ConfigError, InvalidRequest
from headrace.processing.lark import after_thoughts
from headrace.processing.reasoning import (
    Opening,
    Phase,
    ReasoningParser,
    ReasoningParserType,
    detect_reasoning,
    reasoning_parsers,
)
from headrace.processing.tokenizer import Tokenizer
from headrace.processing.tools import ToolParser, ToolParserType, detect_tools, tool_parsers
from headrace.types import GrammarSpec, ThinkingBudget

NUM_TAIL_TOKENS = 32  # of a prompt that came as token ids: enough for what may open the thoughts
NEIGHBOURS = (("", ""), ("a", "a"), (".", "\n\n"), ("\n", "\n"), (" ", " "), (".\n\n", ""))
"""Texts between which the marker of thoughts stands, or its like."""
T = TypeVar("T")


class ParserRegistry:
    """Parsers by name. A plugin's name wins over one of ours."""

    def __init__(self) -> None:
        self.reasoning = reasoning_parsers()
        self.tools = tool_parsers()

    def add_reasoning(self, name: str, parser: ReasoningParserType) -> None:
        self.reasoning[_normal(name)] = parser

    def add_tools(self, name: str, parser: ToolParserType) -> None:
        self.tools[_normal(name)] = parser


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyParsing:
    """How the choices of one request are taken apart."""

    reasoning: ReasoningParserType | None = None
    tools: ToolParserType | None = None
    opening: Opening
    offered: Mapping[str, Any] = field(default_factory=dict)  # functions that may be called, and their schemas
    is_parallel: bool = True  # whether calls after the first are kept
    shown_token_ids: frozenset[int] = frozenset()
    shows_reasoning: bool = True  # else thoughts are taken off and dropped

    def reasoning_parser(self) -> ReasoningParser | None:
        return None if self.reasoning is None else self.reasoning(self.opening)

    def answer_form(self, spec: GrammarSpec) -> GrammarSpec:
        """The same for the answer alone, where thoughts may come before it."""
        tags = _tags(self.reasoning)
        if self.reasoning is None or tags is None:
            return spec
        phase = self.reasoning(self.opening).phase
        if phase is Phase.ANSWER:
            return spec
        return after_thoughts(spec, *tags, is_thinking=phase is Phase.THINKING)

    def tool_parser(self) -> ToolParser | None:
        return None if self.tools is None else self.tools(self.offered)


class Parsing:
    """The parsers of one served model."""

    def __init__(
        self, tokenizer: Tokenizer, reasoning: ReasoningParserType | None = None, tools: ToolParserType | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._tools = tools
        self._reasoning_ids = _special_ids(tokenizer, reasoning.markers if reasoning else ())
        self._tool_ids = _special_ids(tokenizer, tools.markers if tools else ())

    @property
    def tools(self) -> ToolParserType | None:
        return self._tools

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning is not None

    def thinking_budget(self, reply: ReplyParsing | None, max_tokens: int, field: str) -> ThinkingBudget | None:
        """How thoughts of at most that many tokens are ended; None where there will be none. Raises InvalidRequest."""
        tags = _tags(self._reasoning)
        if self._reasoning is None or tags is None or reply is None:
            raise InvalidRequest(
                f"{field} needs a model whose thoughts can be told from its answer (see --reasoning-parser).",
                param=field,
                code="unsupported_field",
            )
        phase = self._reasoning(reply.opening).phase
        if phase is Phase.ANSWER:
            return None
        open_ids, close_ids = (self._tag_ids(tag, field) for tag in tags)
        return ThinkingBudget(phase is Phase.THINKING, open_ids, close_ids, max_tokens)

    def _tag_ids(self, tag: str, field: str) -> tuple[int, ...]:
        """A marker is found and forced by its ids, so they must not depend on the text around it."""
        ids = self._tokenizer.encode(tag, add_special_tokens=False)
        for before, after in NEIGHBOURS:
            if not _contains(self._tokenizer.encode(before + tag + after, add_special_tokens=False), ids):
                raise InvalidRequest(
                    f"{field} cannot be kept to with the served model: {tag} is not made of tokens of its own in its "
                    "vocabulary.",
                    param=field,
                    code="unsupported_field",
                )
        return tuple(ids)

    def of_request(  # budget: each is a fact of its own about the request
        self,
        prompt: str | Sequence[int],
        *,
        continued: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Iterable[Any] | None = None,
        is_parallel: bool = True,
    ) -> ReplyParsing | None:
        """None where replies stay as they are. `continued`: the message that the prompt ends amid; `tools`: those that
        the model may call, as the request writes them."""
        offered = dict(_functions(tools or ()))
        has_tools = self._tools is not None and bool(offered)
        if self._reasoning is None and not has_tools:
            return None
        if not isinstance(prompt, str):
            prompt = self._tokenizer.decode(prompt[-NUM_TAIL_TOKENS:], skip_special_tokens=False)
        return ReplyParsing(
            reasoning=self._reasoning,
            tools=self._tools if has_tools else None,
            opening=Opening(
                prompt if continued is None else continued,
                is_message=continued is not None,
                template_kwargs=template_kwargs or {},
            ),
            offered=offered,
            is_parallel=is_parallel,
            shown_token_ids=self._reasoning_ids | (self._tool_ids if has_tools else frozenset()),
        )


def load_parsing(config: ParsingConfig, tokenizer: Tokenizer) -> Parsing:
    """Runs the plugins and finds the parsers. Raises ConfigError."""
    registry = ParserRegistry()
    for path in config.plugin:
        _run_plugin(Path(path).expanduser(), registry)
    template = tokenizer.chat_template
    source = "" if template is None else template.source + template.tool_source
    return Parsing(
        tokenizer,
        _choose("--reasoning-parser", config.reasoning_parser, detect_reasoning(source), registry.reasoning),
        _choose("--tool-parser", config.tool_parser, detect_tools(source), registry.tools),
    )


def _choose(option: str, name: str, found: str | None, parsers: Mapping[str, T]) -> T | None:
    name = _normal(name)
    if name == "auto":
        return None if found is None else parsers[found]
    if name == "none":
        return None
    if name not in parsers:
        raise ConfigError(f"{option} must be auto, none or one of {', '.join(sorted(parsers))}, not {name!r}.")
    return parsers[name]


def _normal(name: str) -> str:
    """FastDeploy writes `ernie-x1` where vLLM would write `ernie_x1`."""
    return name.strip().lower().replace("-", "_")


def _run_plugin(path: Path, registry: ParserRegistry) -> None:
    if not path.is_file():
        raise ConfigError(f"--plugin {str(path)!r}: no such file")
    spec = importlib.util.spec_from_file_location(f"headrace_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {str(path)!r}: not a Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        register = module.register
        register(registry)
    except Exception as error:  # it is somebody's program
        raise ConfigError(f"--plugin {str(path)!r}: {type(error).__name__}: {error}") from error


def _special_ids(tokenizer: Tokenizer, markers: Sequence[str]) -> frozenset[int]:
    ids = map(tokenizer.backend.token_to_id, markers)
    return frozenset(token_id for token_id in ids if token_id in tokenizer.special_token_ids)


def _tags(reasoning: ReasoningParserType | None) -> tuple[str, str] | None:
    tags: tuple[str, str] | None = getattr(reasoning, "tags", None)
    return tags


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return bool(part) and any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))


def _functions(tools: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"], function.get("parameters")
