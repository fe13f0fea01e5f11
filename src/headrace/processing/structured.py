"""The fields by which a request asks for output of a certain form: OpenAI's, vLLM's old and new ones -> one spec.

`server/protocol` calls `grammar_of` with what the body says; it looks at shapes alone. Whether a grammar can be
followed, `GrammarChecker` finds out, in a thread, before the request is let in.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config.options import GrammarConfig
from headrace.errors import InternalError, InvalidRequest
from headrace.grammar import CompiledGrammar, GrammarCompiler, GrammarError
from headrace.processing.checks import check_bool, check_text, refusal, shown
from headrace.processing.lark import to_engine_form
from headrace.processing.tokenizer import Tokenizer
from headrace.processing.vocabulary import vocabulary_of
from headrace.types import GrammarSpec

logger = logging.getLogger(__name__)

GUIDED = {  # vLLM's fields up to 0.11, and what `structured_outputs` calls the same
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
_KINDS = (*GUIDED.values(), "json_object")
_WHITESPACE = ("whitespace_pattern", "disable_any_whitespace")
_ANY_OBJECT = {"type": "object"}

Found = tuple[GrammarSpec, str]
"""A spec and the path of the field that it came from."""


def grammar_of(fields: Mapping[str, Any]) -> Found | None:
    """What the request asks for; None if it leaves the form open. `fields` holds those that were sent. Two of them
    that each ask for a form are refused, with both names."""
    found: list[Found] = []
    if (value := fields.get("response_format")) is not None:
        found += _response_format(value)
    for field, kind in GUIDED.items():
        if (value := fields.get(field)) is not None:
            found.append((_spec(kind, value, field), field))
    if (value := fields.get("structured_outputs")) is not None:
        found += _structured_outputs(value)
    if len(found) > 1:
        raise conflict(found[0][1], found[1][1])
    return found[0] if found else None


def conflict(first: str, second: str) -> InvalidRequest:
    return InvalidRequest(
        f"{first} and {second} both say what the output must match; only one of them may.", param=second
    )


def format_of(value: Any, field: str, kinds: Sequence[str] = ("text", "json_object", "json_schema")) -> Found | None:
    """The same for a format whose schema stands beside its type, as /v1/responses and /v1/messages have it."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refusal(field, value, "an object with a type")
    kind = value.get("type")
    if kind not in kinds:
        raise refusal(f"{field}.type", kind, "one of " + ", ".join(kinds), code="unsupported_field")
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema(_ANY_OBJECT, field), field
    if value.get("strict") is not None:
        check_bool(value["strict"], f"{field}.strict")  # either way the schema is kept to
    field += ".schema"
    if not isinstance(value.get("schema"), Mapping):
        raise refusal(field, value.get("schema"), "a JSON schema")
    return _schema(value["schema"], field), field


def either(form: Found | None, calls: GrammarSpec | None, field: str = "tool_choice") -> Found | None:
    """What a reply must match: a form that was asked for, or calls that `field` insists on; both are refused."""
    if calls is None:
        return form
    if form is not None:
        raise conflict(form[1], field)
    return calls, field


def _response_format(value: Any) -> list[Found]:
    field = "response_format"
    if not isinstance(value, Mapping):
        raise refusal(field, value, "an object with a type")
    kind = value.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [(_schema(_ANY_OBJECT, field), field)]
    if kind == "json_schema":
        inner = value.get("json_schema")
        field += ".json_schema"
        if not isinstance(inner, Mapping):
            raise refusal(field, inner, "an object with name and schema")
        if inner.get("strict") is not None:
            check_bool(inner["strict"], f"{field}.strict")  # either way the schema is kept to
        field += ".schema"
        if not isinstance(inner.get("schema"), Mapping):
            raise refusal(field, inner.get("schema"), "a JSON schema")
        return [(_schema(inner["schema"], field), field)]
    if kind == "structural_tag":
        return [(_spec("structural_tag", value, field), field)]
    raise refusal(f"{field}.type", kind, "text, json_object, json_schema or structural_tag")


def _structured_outputs(value: Any) -> list[Found]:
    field = "structured_outputs"
    if not isinstance(value, Mapping):
        raise refusal(field, value, f"an object with one of {', '.join(_KINDS)}")
    given = {key: each for key, each in value.items() if each is not None}
    for key in given:
        if key not in (*_KINDS, *_WHITESPACE):
            raise InvalidRequest(
                f"{field} may have {', '.join((*_KINDS, *_WHITESPACE))}, not {shown(key)}.", param=f"{field}.{key[:40]}"
            )
    options = _whitespace(given, field)
    found: list[Found] = []
    for kind in _KINDS:
        if kind not in given:
            continue
        path = f"{field}.{kind}"
        if kind == "json_object":
            if check_bool(given[kind], path):
                found.append((_schema(_ANY_OBJECT, path, options), path))
        elif kind == "json":
            found.append((_schema(given[kind], path, options), path))
        else:
            found.append((_spec(kind, given[kind], path), path))
    return found


def _whitespace(given: Mapping[str, Any], field: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if (pattern := given.get("whitespace_pattern")) is not None:
        options["whitespace_pattern"] = check_text(pattern, f"{field}.whitespace_pattern", allow_empty=True)
    if check_bool(given.get("disable_any_whitespace", False), f"{field}.disable_any_whitespace"):
        options |= {"whitespace_flexible": False, "whitespace_pattern": None}
    return options


def _spec(kind: str, value: Any, field: str) -> GrammarSpec:
    if kind == "json":
        return _schema(value, field)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise refusal(field, value, "a non-empty list of non-empty strings")
        return GrammarSpec("choice", _json(value, field))
    if kind == "structural_tag":
        if isinstance(value, str):
            value = _parsed(value, field)
        if not isinstance(value, Mapping):
            raise refusal(field, value, "an object with structures and triggers")
        return GrammarSpec("structural_tag", _json(value, field))
    text = check_text(value, field)
    if kind == "regex":
        return GrammarSpec("regex", text)
    return GrammarSpec("gbnf" if "::=" in text else "lark", text)


def _schema(value: Any, field: str, options: Mapping[str, Any] | None = None) -> GrammarSpec:
    if isinstance(value, str):
        value = _parsed(value, field)
    if not isinstance(value, Mapping):
        raise refusal(field, value, "a JSON schema: an object, or its text")
    if options:
        own = value.get("x-guidance")
        value = {**value, "x-guidance": {**(own if isinstance(own, Mapping) else {}), **options}}
    return GrammarSpec("json_schema", _json(value, field))


def _parsed(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {str(error)[:200]}.", param=field) from None


def _json(value: Any, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field} is nested too deeply.", param=field) from None


class GrammarChecker:
    """Of one front end. `check` belongs to its event loop."""

    def __init__(self, tokenizer: Tokenizer, config: GrammarConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._compiler: GrammarCompiler | None = None

    async def check(self, spec: GrammarSpec, field: str, vocab_size: int) -> GrammarSpec:
        """The spec as the engine takes it. Raises InvalidRequest that names the field and says what is wrong."""
        most = self._config.max_grammar_bytes
        try:
            size = len(spec.text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{field} holds half of a surrogate pair, which is no character.", param=field
            ) from None
        if size > most:
            raise InvalidRequest(
                f"{field} must have at most {most} bytes (see --max-grammar-bytes), not {size}.", param=field
            )
        timeout_s = self._config.grammar_timeout
        try:
            future = asyncio.wrap_future(self._require_compiler(vocab_size).compile(spec))
            future.add_done_callback(_look)
            compiled = await asyncio.wait_for(asyncio.shield(future), timeout_s)
        except GrammarError as error:
            raise InvalidRequest(f"{field} cannot be followed: {error}.", param=field, code="invalid_grammar") from None
        except TimeoutError:
            raise InvalidRequest(
                f"{field} took longer than {timeout_s:g} s to compile (see --grammar-timeout).",
                param=field,
                code="invalid_grammar",
            ) from None
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            raise InternalError("the grammar could not be compiled", param=field) from error
        return compiled.spec

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _require_compiler(self, vocab_size: int) -> GrammarCompiler:
        if self._compiler is None:
            tokenizer = self._tokenizer

            def special_id(text: str) -> int | None:
                token_id: int | None = tokenizer.backend.token_to_id(text)
                return token_id if token_id in tokenizer.special_token_ids else None

            self._compiler = GrammarCompiler(
                lambda: vocabulary_of(tokenizer),
                vocab_size,
                tokenizer.eos_token_ids,
                num_kept=self._config.num_grammars_kept,
                prepare=lambda spec: to_engine_form(spec, special_id),
            )
        return self._compiler


def _look(future: asyncio.Future[CompiledGrammar]) -> None:
    """asyncio complains of an exception that nobody has looked at, as of one that came too late."""
    if not future.cancelled():
        future.exception()
