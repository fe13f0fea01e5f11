"""What models write when they call tools, a corpus per format, and what it means. For tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# `text`: what a model writes; what is cut off or broken keeps what had been passed on.
STRING = {"type": "string"}
F = {
    "type": "object",
    "properties": {
        "s": STRING,
        "n": {"type": "integer"},
        "o": {"type": "object"},
        "m": {"anyOf": [STRING, {"type": "null"}]},
        "e": {"enum": ["1", "2"]},
    },
}
NAMES: dict[str, Any] = {"f": F, "get_weather": {"properties": {"city": STRING}}, "look_up": None, "a.b": {}}
ARGUMENTS = (
    "{}",
    "{ }",
    '{"city": "Oslo", "days": 3}',
    '{"i":-12,"f":1.5e-3,"n":null,"t":true,"z":0}',
    '{"nested": {"list": [1, [], {}, {"a": [null]}]}, "empty": ""}',
    r'{"escapes": "\u00e9\n\t\"\\\/ \ud83d\ude00", "raw": "é 😀 日本"}',
    '{\n  "spaced" : [ 1 , 2 ]\n}',
    '{"code": "if (a < b) { return \\"</tool\\"; } // [TOOL_CALLS] <tool_call>"}',
)


@dataclass(frozen=True)
class Case:
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = [
    *(Case(hermes_call("f", text), "", [("f", text)]) for text in ARGUMENTS),
    Case("Just text, 1 < 2.\n", "Just text, 1 < 2.\n"),
    Case(" <tool", " <tool"),
    Case(
        "Let me see.\n\n" + hermes_call("f", "{}") + "\n" + hermes_call("look_up", '{"q": 1}') + "\n",
        "Let me see.",
        [("f", "{}"), ("look_up", '{"q": 1}')],
    ),
    Case("a" + hermes_call("f", "{}") + " b", "ab", [("f", "{}")]),
    Case('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    Case('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    Case('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    Case(r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\n\"}"}</tool_call>', "", [("f", '{"a": "\\n"}')]),
    Case('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>', "", [("f", "{}")]),
    Case(r'<tool_call>{"name": "caf\u00e9", "arguments": {}}</tool_call>', "", [("café", "{}")]),
    # cut off
    Case('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu'),
    Case('<tool_call>{"name": "f", "arguments": {"a": tr', "", [("f", '{"a": tr')]),
    Case('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', "", [("f", '{"a": 1}')]),
    # no call, or one that breaks
    Case("<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>"),
    Case('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
    Case('<tool_call>{"name": ""}', '<tool_call>{"name": ""}'),
    Case('<tool_call>{"name": "f", "arguments": 3}', '<tool_call>{"name": "f", "arguments": 3}'),
    Case('<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}'),
    Case(r'<tool_call>{"name": "\ud800", "arguments": {}}', r'<tool_call>{"name": "\ud800", "arguments": {}}'),
    Case('<tool_call>{"name": <tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name":', [("f", "{}")]),
    Case('<tool_call>{"name": "f", "arguments": {"a": nil}}', "nil}}", [("f", '{"a": ')]),
    Case('<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
    Case('<tool_call>{"name": "f", "arguments": {}}} more', "} more", [("f", "{}")]),
]
LLAMA3 = [
    *(Case(f'{{"name": "f", "parameters": {text}}}', "", [("f", text)]) for text in ARGUMENTS),
    Case('<|python_tag|>{"name": "any", "parameters": {}}', "", [("any", "{}")]),
    Case('{"type": "function", "name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    Case(
        '{"name": "f", "parameters": {}}; {"name": "look_up", "parameters": {"q": "x"}}\n',
        "",
        [("f", "{}"), ("look_up", '{"q": "x"}')],
    ),
    Case("Plain { text", "Plain { text"),
    Case('{"city": "Oslo"}', '{"city": "Oslo"}'),
    Case('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Case('text <|python_tag|>{"name": "any"}', "text", [("any", "{}")]),
    Case('<|python_tag|>brave.call(query="x")', '<|python_tag|>brave.call(query="x")'),
    Case('{"name": "f", "parameters": {}}; then', "; then", [("f", "{}")]),
    Case('{"name": "f", "para', '{"name": "f", "para'),
    Case("\n\n", "\n\n"),
]
MISTRAL = [
    *(Case(f'[TOOL_CALLS][{{"name": "f", "arguments": {text}}}]', "", [("f", text)]) for text in ARGUMENTS),
    *(Case(f"[TOOL_CALLS]f[ARGS]{text}", "", [("f", text)]) for text in ARGUMENTS),
    *(Case(f"[TOOL_CALLS]f{text}", "", [("f", text)]) for text in ARGUMENTS),
    Case(
        'Yes. [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "look_up", "arguments": {"q": [1]}}]',
        "Yes.",
        [("f", "{}"), ("look_up", '{"q": [1]}')],
    ),
    Case(
        '[TOOL_CALLS]f{}[TOOL_CALLS]look_up[CALL_ID]abcdefgh1[ARGS]{"a": 1}', "", [("f", "{}"), ("look_up", '{"a": 1}')]
    ),
    Case("[TOOL_CAL", "[TOOL_CAL"),
    Case("[TOOL_CALLS]", "[TOOL_CALLS]"),
    Case("[TOOL_CALLS] what?", "[TOOL_CALLS] what?"),
    Case('[TOOL_CALLS][{"name": "f", "arguments": {}}, oops]', ", oops]", [("f", "{}")]),
    Case('[TOOL_CALLS]f[ARGS]{"a": ', "", [("f", '{"a": ')]),
    Case("[see] [1]", "[see] [1]"),
]
DEEPSEEK = [
    *(
        Case(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            f"{text}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("f", text)],
        )
        for text in ARGUMENTS
    ),
    *(
        Case(
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("f", text)],
        )
        for text in ARGUMENTS
    ),
    Case(
        "Now.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"q": 1}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "Now.",
        [("f", "{}"), ("look_up", '{"q": 1}')],
    ),
    Case("<｜tool▁calls▁begin｜>hello", "<｜tool▁calls▁begin｜>hello"),
    Case(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁"
    ),
    Case('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a"', "", [("f", '{"a"')]),
    Case("a ｜ b <｜", "a ｜ b <｜"),
]
PYTHONIC = [
    Case("[f()]", "", [("f", "{}")]),
    Case('[get_weather(city="Oslo", days=3)]', "", [("get_weather", '{"city": "Oslo", "days": 3}')]),
    Case(
        "[f(a=[1, {'k': (2, None)}], b=-1.5, c=True, d=null), look_up(q='it\\'s [x], ok')]",
        "",
        [
            ("f", '{"a": [1, {"k": [2, null]}], "b": -1.5, "c": true, "d": null}'),
            ("look_up", '{"q": "it\'s [x], ok"}'),
        ],
    ),
    Case("[a.b( x = 'é\\n' , )]", "", [("a.b", '{"x": "é\\n"}')]),
    Case("<|python_start|>[f()]<|python_end|>", "", [("f", "{}")]),
    Case(r"[f(p='\d')]", "", [("f", '{"p": "\\\\d"}')]),
    Case("[unknown()]", "[unknown()]"),
    Case("[1, 2]", "[1, 2]"),
    Case("[link](http://x)", "[link](http://x)"),
    Case("text [f()]", "text [f()]"),
    Case("[f(1)]", "[f(1)]"),
    Case("[f(a=g())]", "[f(a=g())]"),
    Case("[f(a=1e999)]", "[f(a=1e999)]"),
    Case("[f(a=1, b=x y), look_up()]", ", b=x y), look_up()]", [("f", '{"a": 1')]),
    Case("[f(a=1, a=2)]", ", a=2)]", [("f", '{"a": 1')]),
    Case("[f(a='cut", "[f(a='cut"),
    Case("[f(a=1)] and more", "and more", [("f", '{"a": 1}')]),
    Case("[f(a=(1])]", "[f(a=(1])]"),
]


def qwen3_coder(name: str, **values: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm45(name: str, **values: str) -> str:
    written = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{written}</tool_call>"


CODE = "if a < b:\n\n    print(\"</param\", '\\n')  # é 😀 </arg_valu"


def tagged(call: Callable[..., str]) -> list[Case]:
    """What both formats have in common."""
    code = json.dumps(CODE, ensure_ascii=False)
    return [
        Case(call("f"), "", [("f", "{}")]),
        Case(call("f", s="Oslo", n="3"), "", [("f", '{"s": "Oslo", "n": 3}')]),
        Case(call("f", s=CODE), "", [("f", f'{{"s": {code}}}')]),
        Case(call("f", s="12", e="1", m="null"), "", [("f", '{"s": "12", "e": "1", "m": null}')]),
        Case(call("f", m="some text", n="many"), "", [("f", '{"m": "some text", "n": "many"}')]),
        Case(call("f", o='{"a": [1, null]}', x="[1, 2]"), "", [("f", '{"o": {"a": [1, null]}, "x": [1, 2]}')]),
        Case(call("f", x="True", y="None", z="NaN"), "", [("f", '{"x": true, "y": null, "z": "NaN"}')]),
        Case(call("look_up", q="x y", n="1.5"), "", [("look_up", '{"q": "x y", "n": 1.5}')]),
        Case(
            "Let me see.\n" + call("f") + "\n" + call("f", s="") + " so",
            "Let me see.so",
            [("f", "{}"), ("f", '{"s": ""}')],
        ),
        # cut off
        Case(call("f", s="Oslo and more").split(" more")[0], "", [("f", '{"s": "Oslo and')]),
        Case(call("f", n="3")[:-12].rstrip().removesuffix("</function>").rstrip()[:-3], "", [("f", '{"n": ')]),
        # no call
        Case("<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>"),
        Case("<tool", "<tool"),
    ]


QWEN3_CODER = [
    *tagged(qwen3_coder),
    Case("<tool_call><function=new><parameter=a>1</parameter></function></tool_call>", "", [("new", '{"a": 1}')]),
    Case("<tool_call>\n<function=f>\n<par", "<tool_call>\n<function=f>\n<par"),
    Case(qwen3_coder("f", s="a")[:-30], "", [("f", '{"s": "a')]),
    Case("<tool_call><function=f><parameter=s>a</parameter><parameter=s>", "<parameter=s>", [("f", '{"s": "a"')]),
]
GLM45 = [
    *tagged(glm45),
    Case("<tool_call>f<arg_key>s</arg_key><arg_value> a </arg_value></tool_call>", "", [("f", '{"s": " a "}')]),
    Case("<tool_call>new\n</tool_call>", "<tool_call>new\n</tool_call>"),
    Case("<tool_call>f\n<arg_key>s</arg_key> oops", "<tool_call>f\n<arg_key>s</arg_key> oops"),
]
CORPUS = {
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "hermes": HERMES,
    "ernie_x1": HERMES,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "pythonic": PYTHONIC,
}
