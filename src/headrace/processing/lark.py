"""Grammars of other kinds as llguidance reads them: GBNF, choices, structural tags, forced calls, optional thoughts.

`structured.py` calls `to_engine_form` in the thread that compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace.grammar import FORCED_OPTIONS, SCHEMA_OPTIONS, GrammarError, source_of
from headrace.processing.checks import shown
from headrace.types import GrammarSpec

HEADER = "%llguidance {}\n"

SpecialId = Callable[[str], int | None]
"""The id of a text that is a special token; None for any other text."""


def to_engine_form(spec: GrammarSpec, special_id: SpecialId) -> GrammarSpec:
    """The same grammar as json_schema, regex, lark or llguidance. Raises GrammarError."""
    if spec.kind == "after_thoughts":
        return GrammarSpec("llguidance", _after_thoughts(json.loads(spec.text), special_id))
    if spec.kind == "gbnf":
        try:
            return GrammarSpec("lark", gbnf_to_lark(spec.text))
        except Exception as error:  # the converter raises plain Exception, and IndexError at an end it did not expect
            raise GrammarError(f"it is no GBNF: {str(error)[:300]}") from error
    if spec.kind == "choice":
        # One terminal: as a rule, each choice would cost an item in every step.
        return GrammarSpec("lark", f"{HEADER}start: CHOICE\nCHOICE: " + " | ".join(map(quoted, json.loads(spec.text))))
    if spec.kind == "structural_tag":
        return GrammarSpec("lark", _structural_tag(json.loads(spec.text), special_id))
    if spec.kind == "tool_calls":
        return GrammarSpec("lark", _tool_calls(json.loads(spec.text), special_id))
    return spec


def quoted(text: str) -> str:
    """A literal. JSON's escapes are Lark's too, but for those above ASCII, which need none."""
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, special_id: SpecialId) -> str:
    """A literal, or the special token that is written like it."""
    if not text:
        return ""
    token_id = special_id(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def schema_item(schema: Any) -> str:
    """JSON that matches a schema, as part of a rule, with the options that schemas by themselves have."""
    if isinstance(schema, Mapping):
        own = schema.get("x-guidance")
        options = {**SCHEMA_OPTIONS, **(own if isinstance(own, Mapping) else {}), **FORCED_OPTIONS}
        schema = {**schema, "x-guidance": options}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def after_thoughts(spec: GrammarSpec, opener: str, closer: str, *, is_thinking: bool) -> GrammarSpec:
    """A grammar for the answer alone: thoughts come before it, or may come where the prompt has not opened them."""
    value = {"opener": opener, "closer": closer, "is_thinking": is_thinking, "kind": spec.kind, "text": spec.text}
    return GrammarSpec("after_thoughts", json.dumps(value, ensure_ascii=False))


def _after_thoughts(value: Mapping[str, Any], special_id: SpecialId) -> str:
    source = source_of(to_engine_form(GrammarSpec(value["kind"], value["text"]), special_id))
    answer = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    closer_id = special_id(value["closer"])
    thoughts = "body" if value["is_thinking"] else f"({literal(value['opener'], special_id)} body)?"
    rules = [
        f"{HEADER}start: {thoughts} SPACE @answer",
        f"body[lazy]: TEXT {quoted(value['closer'])}" if closer_id is None else f"body: TEXT <[{closer_id}]>",
        r"TEXT: /(.|\n)*/",
        r"SPACE: /[ \n\r\t]{0,8}/",
    ]
    main = {"name": "main", "lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [main, {**answer, "name": "answer"}]}, ensure_ascii=False)


def _tool_calls(value: Mapping[str, Any], special_id: SpecialId) -> str:
    """`tools/forced.py` writes the value: what stands before, the calls of which one or more come, what is between
    two of them (null: there is one only), what stands after, and rules that a call may be made of. Each is a list of
    parts: literals, and objects of one of the kinds that `item` knows."""
    texts: dict[str, str] = {}  # rules of plain text, with the tag that ends it

    def item(part: Any) -> str:
        if isinstance(part, str):
            return quoted(part)
        if "schema" in part:
            return schema_item(part["schema"])
        if "marker" in part:
            return literal(part["marker"], special_id)
        if "one_of" in part:
            return f"({' | '.join(map(quoted, filter(None, part['one_of'])))}){'?' if '' in part['one_of'] else ''}"
        if "text_until" in part:
            end_id = special_id(part["text_until"])
            body = f"[lazy]: TEXT {quoted(part['border'] + part['text_until'])}"
            return texts.setdefault(body if end_id is None else f": TEXT <[{end_id}]>", f"text_{len(texts)}")
        return str(part["rule"]) if "rule" in part else quoted(part["maybe"]) + "?"

    def sequence(parts: list[Any]) -> str:
        return " ".join(map(item, filter(None, parts)))

    more = "" if value["more"] is None else f"({sequence(value['more'])} call)*"
    rules = [f"{HEADER}start: {sequence(value['before'])} call {more} {sequence(value['after'])}"]
    rules.append("call: " + " | ".join(sequence(call) for call in value["calls"]))
    for name, rule in value.get("rules", {}).items():
        rules.append(f"{name}: ({' | '.join(map(sequence, rule['either']))}){'?' if rule['is_optional'] else ''}")
    rules += [f"{name}{body}" for body, name in texts.items()]
    return "\n".join([*rules, *([r"TEXT: /(.|\n)*/"] if texts else [])])


def _structural_tag(value: Mapping[str, Any], special_id: SpecialId) -> str:
    """Free text, in which a trigger begins a tag: its begin, JSON of its schema, its end (vLLM's first form)."""
    if "format" in value:
        raise GrammarError("of the two forms of structural tags only that with structures and triggers is available")
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise GrammarError("structures and triggers must be non-empty lists")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GrammarError("triggers must be non-empty strings")
    bodies: dict[str, list[str]] = {}
    for index, structure in enumerate(structures):
        begin, schema, end = _parts(structure, index)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"structures[{index}].begin begins with none of the triggers: {shown(begin)}")
        rest = begin[len(trigger) :]
        parts = (literal(rest, special_id), schema_item(schema), literal(end, special_id))
        bodies.setdefault(trigger, []).append(" ".join(filter(None, parts)))
    rules = [f"{HEADER}start: ({' | '.join(f'tag_{i}' for i in range(len(bodies)))})* rest", "rest: TEXT"]
    rules.append(r"TEXT: /(.|\n)*/")
    for index, (trigger, alternatives) in enumerate(bodies.items()):
        body = " | ".join(f"({alternative})" for alternative in alternatives)
        token_id = special_id(trigger)
        if token_id is not None:
            rules.append(f"tag_{index}: TEXT <[{token_id}]> ({body})")
        else:
            rules.append(f"open_{index}[lazy]: TEXT {quoted(trigger)}")
            rules.append(f"tag_{index}: open_{index} ({body})")
    return "\n".join(rules)


def _parts(structure: Any, index: int) -> tuple[str, Any, str]:
    if not isinstance(structure, Mapping):
        raise GrammarError(f"structures[{index}] must be an object with begin, schema and end")
    begin, end = structure.get("begin"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"structures[{index}] must have texts as begin and end")
    schema = structure.get("schema")
    return begin, {} if schema is None else schema, end
