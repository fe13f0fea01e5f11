"""Chat templates render as in transformers, and fail as errors of the request, never otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.processing.chat_template import ChatTemplate

CHATML = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n<tools>" }}
{%- for tool in tools %}
{{- "\\n" }}{{- tool | tojson }}
{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first and tools %}{% continue %}{% endif %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
    {%- set ns.last = message.role %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if documents %}{% for d in documents %}{{- d.title ~ ': ' ~ d.text }}{% endfor %}{% endif %}
{{- date_string }}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
PARTS = """{% for message in messages %}{{ message.role }}:
{% for part in message['content'] %}{{ part.type }}={{ part.text }};{% endfor %}
{% endfor %}"""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<wärme> & 'more'", "parameters": {"type": "object"}}}
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "Hi <b>&</b> 漢 😀\n  two "}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "c"},
    ],
    "nothing": [{"role": "user", "content": "a", "name": None, "tool_calls": None}],
}
SYSTEM = [{"role": "system", "content": "S"}, *CHATS["turns"]]
TOOL_CALLS = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None, "é<"]}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]
CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    *((source, chat, {}) for source in (CHATML, LLAMA3, MISTRAL) for chat in CHATS.values()),
    (CHATML, SYSTEM, {"tools": TOOLS}),
    (CHATML, TOOL_CALLS, {"tools": TOOLS}),
    (CHATML, TOOL_CALLS, {}),
    (CHATML, SYSTEM, {"enable_thinking": False}),
    (LLAMA3, SYSTEM, {"documents": [{"title": "T", "text": "x"}], "date_string": "today"}),
    (PARTS, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template


@pytest.mark.parametrize(("source", "chat", "options"), CASES)
@pytest.mark.parametrize("mode", ["prompt", "plain", "continue"])
def test_renders_as_transformers(
    reference: Any, source: str, chat: list[dict[str, Any]], options: dict[str, Any], mode: str
) -> None:
    ours = ChatTemplate(source, special_tokens=TOKENS)
    flags = {"add_generation_prompt": mode == "prompt", "continue_final_message": mode == "continue"}
    # transformers drops keys without a value before it renders (apply_chat_template, not render_jinja_template).
    given = [{key: value for key, value in message.items() if value is not None} for message in chat]
    expected = reference([given], chat_template=source, **TOKENS, **options, **flags)[0][0]
    tools = options.get("tools")
    kwargs = {key: value for key, value in options.items() if key != "tools"}
    assert ours.render(chat, tools=tools, kwargs=kwargs, **flags) == expected


def test_arguments_sent_as_a_string_become_an_object() -> None:
    template = ChatTemplate(CHATML)
    as_text = json.loads(json.dumps(TOOL_CALLS))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    before = json.dumps(as_text)
    assert template.render(as_text) == template.render(TOOL_CALLS)
    assert json.dumps(as_text) == before  # the caller's messages stay as they are
    function["arguments"] = "{broken"
    with pytest.raises(InvalidRequest) as caught:
        template.render(as_text)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_content_is_what_the_template_expects() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "a\nb<|im_end|>" in ChatTemplate(CHATML).render(parts)
    assert ChatTemplate(PARTS).render(parts) == "user:\ntext=a;text=b;"
    assert ChatTemplate(PARTS).render([{"role": "user", "content": "ab"}]) == "user:\ntext=ab;"
    both = "{% for m in messages %}{% if m.content is string %}S{{ m.content }}{% else %}L{% endif %}"
    both += "{% for p in m.content %}{% endfor %}{% endfor %}"
    assert ChatTemplate(both).render([{"role": "user", "content": "ab"}]) == "Sab"


def test_a_part_that_is_no_text_is_refused() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        ChatTemplate(CHATML).render(image)
    assert caught.value.param == "messages[0].content[0]"


def test_the_templates_own_refusal_reaches_the_user() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        ChatTemplate(MISTRAL, special_tokens=TOKENS).render(SYSTEM)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.more }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].role }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 'x' * (10 ** 8) }}",
        "{{ [0] * (10 ** 8) }}",
        "{{ 10 ** (10 ** 5) }}",
        "{{ '%100000000d' % 1 }}",
        "{{ '%*d' % (10 ** 8, 1) }}",
        "{{ '%100000000d' | format(1) }}",
        "{{ '{:>100000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10 ** 8) }}",
        "{{ 'x'.ljust(10 ** 8) }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'x' | center(10 ** 8) }}",
        "{{ 'x' | indent(10 ** 8, true) }}",
        "{% for i in range(50000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ {} | tojson(indent=10 ** 8) }}",
    ],
)
def test_failing_templates_are_errors_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 2000


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].items.__self__.clear() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = ChatTemplate(source).render([{"role": "user", "content": "x"}])
    except InvalidRequest:
        return
    assert text == ""  # what the sandbox hides is undefined


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for a in b %}", "{{ a | nofilter }}", "{% break %}"])
def test_broken_source(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source)
    assert caught.value.param == "chat_template"


def test_continue_and_new_prompt_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(CHATS["plain"], add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_continue_needs_content_that_the_template_keeps() -> None:
    gone = "{% for m in messages %}{{ m.role }}{% endfor %}"
    for source, chat in ((gone, CHATS["plain"]), (CHATML, TOOL_CALLS[:2])):
        with pytest.raises(InvalidRequest) as caught:
            ChatTemplate(source).render(chat, add_generation_prompt=False, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def test_kwargs_may_not_replace_the_requests_own_fields() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(CHATS["plain"], kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render([])
    assert caught.value.param == "messages"


def test_reasoning_goes_under_every_name() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert ChatTemplate(source).render([{"role": "assistant", "reasoning": "r"}]) == "rr"


def test_formatting_of_sane_width_works() -> None:
    source = (
        "{{ '%03d' % 7 }}|{{ '{:>4}'.format('a') }}|{{ 'b' | center(5) }}|{{ 1 ~ none ~ 'c' ~ gone }}|{{ 2 ** 10 }}"
    )
    assert ChatTemplate(source).render(CHATS["plain"]) == "007|   a|  b  |1Nonec|1024"


def test_named_templates() -> None:
    template = ChatTemplate.of_named({"default": "plain", "tool_use": "with tools"}, {})
    assert template is not None
    assert template.render(CHATS["plain"]) == "plain"
    assert template.render(CHATS["plain"], tools=TOOLS) == "with tools"
    assert ChatTemplate.of_named({"rag": "a", "other": "b"}, {}) is None
