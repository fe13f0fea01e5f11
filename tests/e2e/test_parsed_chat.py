"""Thoughts and tool calls through a real server and the official `openai` client, streaming helper included.

The mock engine repeats its prompt, so a prompt of token ids (bytes) says what the model will say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.testing.server import RunningServer

ARGUMENTS = '{"city": "Málaga", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
SAYS = f"<think>\nWhere? 🤔\n</think>\n\nLet me see.\n{CALL}"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}]
OPTIONS: Any = {
    "model": "echo",
    "messages": [{"role": "user", "content": "not read"}],
    "tools": TOOLS,
    "stop": ["END"],
    "extra_body": {"prompt_token_ids": list((SAYS + "END").encode())},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    parsers = ["--reasoning-parser", "think", "--tool-parser", "hermes"]
    with RunningServer(["--mock-engine", *parsers]) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=60) as client:
        yield client


def check(completion: Any) -> None:
    (choice,) = completion.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == choice.message.reasoning == "Where? 🤔"
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
    assert call.id.startswith("call_")


def test_plain(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**OPTIONS)
    check(completion)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(SAYS.encode())
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == len("\nWhere? 🤔\n</think".encode())


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    fragments, content = "", ""
    with client.chat.completions.stream(**OPTIONS) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                fragments += event.arguments_delta
            elif event.type == "content.delta":
                content += event.delta
        completion = stream.get_final_completion()
    check(completion)
    assert (fragments, content) == (ARGUMENTS, "Let me see.")
    assert completion.choices[0].message.tool_calls is not None
    assert completion.choices[0].message.tool_calls[0].function.parsed_arguments == {"city": "Málaga", "days": 3}


def test_the_answer_to_a_call_goes_back(client: openai.OpenAI) -> None:
    call = client.chat.completions.create(**OPTIONS).choices[0].message.tool_calls[0]  # type: ignore[index]
    messages: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert client.chat.completions.create(model="echo", messages=messages, tools=TOOLS, max_tokens=5).choices  # type: ignore[call-overload]


def test_a_parser_that_is_unknown_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="--tool-parser must be auto, none or one of"):
        RunningServer(["--mock-engine", "--tool-parser", "guess"])
    plugin = tmp_path / "mine.py"
    plugin.write_text("1 / 0")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        RunningServer(["--mock-engine", "--plugin", str(plugin)])
