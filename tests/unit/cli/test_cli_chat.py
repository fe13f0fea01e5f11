"""Chat over a fake model: history, commands, interruption, piped use; and how a server's stream is read."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from headrace.cli import chat, sources
from headrace.cli.chat import Conversation, Speed
from headrace.cli.sources import Piece, RemoteSource, api_base
from headrace.errors import FailedRequest, InvalidRequest, StartupError

HTTP_CLIENT = httpx.Client


class FakeSource:
    """Answers with the number of messages that it was given, in two pieces."""

    name = "fake"

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []
        self.num_closed = 0
        self.interrupt = False
        self.fail = False

    def chat(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> Generator[Piece, None, None]:
        self.seen.append(messages)
        try:
            if self.fail:
                raise InvalidRequest("too long", code="context_length_exceeded")
            yield Piece("answer to ", 2)
            if self.interrupt:
                raise KeyboardInterrupt
            yield Piece(str(len(messages)), 3)
        finally:
            self.num_closed += 1

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Generator[Piece, None, None]:
        yield Piece(f"after {prompt}")

    def close(self) -> None: ...


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def ask(conversation: Conversation, text: str) -> tuple[str, Speed]:
    parts: list[str] = []
    speed = conversation.ask(text, parts.append)
    return "".join(parts), speed


def test_the_conversation_is_sent_whole(source: FakeSource) -> None:
    conversation = Conversation(source, {}, "be brief")
    answer, speed = ask(conversation, "one")
    assert answer == "answer to 2"
    assert speed.num_tokens == 3
    assert speed.first_s is not None
    ask(conversation, "two")
    assert [message["content"] for message in source.seen[1]] == ["be brief", "one", "answer to 2", "two"]
    assert [message["role"] for message in source.seen[1]] == ["system", "user", "assistant", "user"]


def test_ctrl_c_stops_the_answer_and_keeps_its_part(source: FakeSource) -> None:
    conversation = Conversation(source, {})
    source.interrupt = True
    answer, speed = ask(conversation, "one")
    assert (answer, speed.was_stopped) == ("answer to ", True)
    assert source.num_closed == 1  # which is what aborts the request
    assert conversation.messages[-1] == {"role": "assistant", "content": "answer to "}
    assert str(speed).startswith("stopped")


def test_ctrl_c_while_writing_stops_the_generation(source: FakeSource) -> None:
    conversation = Conversation(source, {})

    def write(text: str) -> None:
        raise KeyboardInterrupt

    assert conversation.ask("one", write).was_stopped
    assert source.num_closed == 1


def test_a_failed_question_is_not_remembered(source: FakeSource, console: Console) -> None:
    conversation = Conversation(source, {})
    source.fail = True
    chat._show_answer(conversation, "one", console)
    assert "too long" in said(console)
    assert "/clear" in said(console)
    assert conversation.messages == []


def test_commands(source: FakeSource, console: Console) -> None:
    conversation = Conversation(source, {}, "old")
    ask(conversation, "one")
    assert chat._command(conversation, "/system  new prompt ", console)
    assert (conversation.system, conversation.messages) == ("new prompt", [])
    ask(conversation, "one")
    assert chat._command(conversation, "/clear", console)
    assert (conversation.system, conversation.messages) == ("new prompt", [])
    assert chat._command(conversation, "/system", console)
    assert conversation.system is None
    assert chat._command(conversation, "/help", console)
    assert "/clear" in said(console)
    assert chat._command(conversation, "/frobnicate", console)
    assert "/frobnicate" in said(console)
    assert not chat._command(conversation, "/quit", console)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["plain"], "plain"),
        (["one \\", "two"], "one \ntwo"),
        (['"""', "def f():", "    pass", '"""'], "\ndef f():\n    pass\n"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one line"""'], "one line"),
    ],
)
def test_messages_of_many_lines(typed: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    assert chat._read_message() == message
    assert next(lines, None) is None


def test_the_terminal_loop(source: FakeSource, console: Console, monkeypatch: pytest.MonkeyPatch,
                           capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    script: Iterator[str | type[BaseException]] = iter(["", "hello", KeyboardInterrupt, "/nope", "again", EOFError])

    def read(prompt: str = "") -> str:
        typed = next(script)
        if isinstance(typed, str):
            return typed
        raise typed

    monkeypatch.setattr("builtins.input", read)
    chat._talk(Conversation(source, {}), console)
    assert capsys.readouterr().out == "answer to 1\nanswer to 3\n"
    assert "tokens/s" in said(console)
    assert "/quit" in said(console)


def test_piped_lines_give_plain_answers(source: FakeSource, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(chat, "open_source", lambda args: source)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    from headrace.cli.main import main

    assert main(["chat", "--temperature", "0"]) == 0
    assert capsys.readouterr() == ("answer to 1\nanswer to 3\n", "")


def test_piped_failure_is_a_line_and_exit_code_1(source: FakeSource, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    source.fail = True
    monkeypatch.setattr(chat, "open_source", lambda args: source)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    from headrace.cli.main import main

    assert main(["chat"]) == 1
    assert capsys.readouterr() == ("", "headrace: too long\n")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("h:1", "http://h:1/v1"),
        ("https://h/api/v1", "https://h/api/v1"),
    ],
)
def test_api_base(url: str, base: str) -> None:
    assert api_base(url) == base


def remote(monkeypatch: pytest.MonkeyPatch, reply: str, status: int = 200) -> tuple[RemoteSource, list[httpx.Request]]:
    """A RemoteSource whose server lists the model m and gives `reply` to everything else."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(status, text=reply)

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(sources.httpx, "Client", functools.partial(HTTP_CLIENT, transport=transport))
    return RemoteSource("http://h", "secret", None), requests


def sse(*chunks: dict[str, Any]) -> str:
    return ": comment\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_remote_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = sse(
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Pa"}}]},
        {"choices": [{"delta": {"content": "ris"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}},
    )
    source, requests = remote(monkeypatch, reply)
    pieces = list(source.chat([{"role": "user", "content": "?"}], {"temperature": 0.5}))
    assert "".join(piece.text for piece in pieces) == "Paris"
    assert pieces[-1].num_tokens == 2
    body = json.loads(requests[-1].content)
    assert (body["model"], body["stream"], body["temperature"]) == ("m", True, 0.5)
    assert requests[-1].headers["authorization"] == "Bearer secret"


def test_remote_completion_and_an_error_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = sse({"choices": [{"text": "one"}]}, {"error": {"message": "the engine died", "code": "engine_dead"}})
    source, _ = remote(monkeypatch, reply)
    pieces = source.complete("x", {})
    assert next(pieces).text == "one"
    with pytest.raises(FailedRequest, match="the engine died"):
        next(pieces)


def test_remote_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"error": {"message": "max_tokens must be", "type": "t", "code": "c", "param": "max_tokens"}})
    source, _ = remote(monkeypatch, body, status=400)
    with pytest.raises(FailedRequest, match="max_tokens must be") as caught:
        list(source.complete("x", {}))
    assert caught.value.param == "max_tokens"
    source, _ = remote(monkeypatch, "<html>gateway</html>", status=502)
    with pytest.raises(FailedRequest, match="502"):
        list(source.complete("x", {}))


def test_remote_that_is_no_such_server(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="hello"))
    monkeypatch.setattr(sources.httpx, "Client", functools.partial(HTTP_CLIENT, transport=transport))
    with pytest.raises(StartupError, match="OpenAI-compatible"):
        RemoteSource("http://h", None, None)
