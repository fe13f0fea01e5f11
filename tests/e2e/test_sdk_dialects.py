"""The official `anthropic` and `openai` clients on /v1/messages and /v1/responses of a real server.

Its mock engine says the prompt again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from headrace.testing.server import RunningServer

KEY, MODEL = "user-key", "echo"
HI: Any = [{"role": "user", "content": "Name the rivers."}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = ["--mock-engine", "--mock-step-delay", "0.002", "--served-model-name", MODEL, "--api-key", KEY]
    with RunningServer(options) as running:
        yield running


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


def test_messages_and_their_stream(claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": HI, "system": "Be brief."}
    plain = claude.messages.create(**options)
    assert (plain.stop_reason, plain.usage.output_tokens) == ("max_tokens", 40)
    with claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    (block,) = plain.content
    assert block.type == "text"
    assert block.text == text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 40)
    counted = claude.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.")
    cached = streamed.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == streamed.usage.input_tokens + cached
    stopped = claude.messages.create(**options, stop_sequences=["rivers"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rivers")


def test_anthropic_s_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, max_tokens=0, messages=HI)
    assert caught.value.body["error"]["param"] == "max_tokens"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=5, messages=HI)


def test_responses_and_their_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": "Name the rivers.", "max_output_tokens": 40}
    plain = client.responses.create(**options)
    assert plain.status == "incomplete"
    assert plain.incomplete_details is not None
    assert plain.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == plain.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == plain.output_text
    assert last.response.usage is not None
    assert plain.usage is not None
    assert last.response.usage.total_tokens == plain.usage.total_tokens


def test_responses_are_kept_and_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="One.", max_output_tokens=4)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=MODEL, input="Two.", previous_response_id=first.id, max_output_tokens=200, instructions="Be brief."
    )
    assert "Two." in second.output_text
    assert "One." in second.output_text
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_is_cancelled_from_elsewhere(client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input="Hi", max_output_tokens=20_000, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    assert client.responses.cancel(first.response.id).status == "cancelled"
    last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"


def test_generate_ends_by_its_rid_with_what_it_has(server: RunningServer) -> None:
    body = {"text": "abc", "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 20_000}}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", server.url + "/generate", json=body, headers=headers, timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        aborted = httpx.post(server.url + "/abort_request", json={"rid": "mine"}, timeout=30)
        assert aborted.json()["aborted"] == 1
        frames = [line for line in lines if line]
    assert frames[-1] == "data: [DONE]"
    assert '"type":"abort"' in frames[-2]
