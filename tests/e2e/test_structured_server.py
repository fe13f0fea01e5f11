"""Structured output through the whole server, on a tiny model with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from headrace.testing.schemas import SCHEMAS
from headrace.testing.server import RunningServer

QUESTION: Any = [{"role": "user", "content": "Say it."}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "move", "parameters": SCHEMAS["person"]}},
    {"type": "function", "function": {"name": "rest"}},
]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[RunningServer]:
    options = ["--served-model-name", "tiny", "--num-kv-blocks", "400", "--tool-parser", "hermes"]
    with RunningServer([str(tiny_model), *options]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, name: str, seed: int = 0, **fields: Any) -> Any:
    form: Any = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}
    return client.chat.completions.create(
        model="tiny", messages=QUESTION, response_format=form, max_tokens=500, seed=seed, **fields
    )


def test_answers_match_their_schemas_beside_free_ones(client: OpenAI) -> None:
    def free(seed: int) -> int:
        reply = client.completions.create(model="tiny", prompt="free", max_tokens=40, seed=seed)
        assert reply.usage
        return reply.usage.completion_tokens

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(free, seed) for seed in range(4)]
        replies = list(pool.map(lambda name: (name, ask(client, name)), SCHEMAS))
    assert all(future.result() > 0 for future in others)
    for name, reply in replies:
        assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMAS[name])


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = ask(client, "person", 4).choices[0]
    chunks = list(ask(client, "person", 4, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_bad_schema_is_400_and_the_server_serves_on(client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="uniqueItems") as caught:
            client.completions.create(
                model="tiny",
                prompt="x",
                stream=stream,
                extra_body={"guided_json": {"uniqueItems": True, "type": "array"}},
            )
        assert caught.value.param == "guided_json"
    assert ask(client, "boolean").choices[0].message.content in ("true", "false")


def test_choices_regexes_and_grammars(client: OpenAI) -> None:
    def say(**structured: Any) -> str:
        reply = client.completions.create(
            model="tiny", prompt="x", max_tokens=60, extra_body={"structured_outputs": structured}
        )
        return reply.choices[0].text

    assert say(choice=["left", "right"]) in ("left", "right")
    assert len(say(regex="[a-f0-9]{8}")) == 8
    assert say(grammar='root ::= "a" | "b"') in ("a", "b")
    assert isinstance(json.loads(say(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 3})), list)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_forced_tool_calls(client: OpenAI, choice: Any) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=500
    )
    [call] = reply.choices[0].message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS["person"] if call.function.name == "move" else {"maxProperties": 0})
    assert call.function.name == "move" or choice == "required"


class Shirt(BaseModel):
    size: Literal["small", "large"]
    is_red: bool


def test_the_other_routes_keep_to_forms_too(server: RunningServer, client: OpenAI) -> None:
    response = client.responses.parse(model="tiny", input="Say it.", text_format=Shirt, max_output_tokens=500)
    assert isinstance(response.output_parsed, Shirt)
    functions: Any = [{"type": "function", "name": "move", "parameters": SCHEMAS["person"], "strict": True}]
    response = client.responses.parse(
        model="tiny", input="Go.", tools=functions, tool_choice="required", max_output_tokens=500
    )
    assert {item.type for item in response.output} == {"function_call"}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as claude:
        message = claude.messages.parse(model="tiny", messages=QUESTION, output_format=Shirt, max_tokens=500)
        assert isinstance(message.parsed_output, Shirt)
        tools: Any = [{"name": "move", "input_schema": SCHEMAS["person"]}]
        choice: Any = {"type": "tool", "name": "move"}
        options: Any = {"model": "tiny", "messages": QUESTION, "tools": tools, "tool_choice": choice}
        with claude.messages.stream(**options, max_tokens=500) as stream:
            [block] = stream.get_final_message().content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMAS["person"])


def test_one_that_fails_late_ends_with_an_error_frame_alone(server: RunningServer) -> None:
    """After its first token this grammar has more ways to go on than llguidance follows."""
    many = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2100)}}
    body = {"prompt": "x", "max_tokens": 50, "stream": True, "guided_json": many}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            httpx.post, server.url + "/v1/completions", json={"prompt": "y", "max_tokens": 30}, timeout=30
        )
        text = httpx.post(server.url + "/v1/completions", json=body, timeout=60).text
    assert other.result().status_code == 200
    frames = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame]
    if len(frames) > 1:  # else the error came along with the first token, before the stream had begun
        assert frames.pop() == "[DONE]"
    assert "cannot follow its grammar" in json.loads(frames[-1])["error"]["message"]
    assert server.get("/readyz").status_code == 200
