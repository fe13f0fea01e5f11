"""The error table: every failure has http.md's status and its one body, on every route; no traceback leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx
import pytest

from headrace.client.base import Delta
from headrace.errors import DeadlineExceeded, ErrorInfo, QueueFull, RequestError, Unavailable
from headrace.server.middleware import REQUEST_ID
from headrace.testing.front_end import FakeClient, FrontEnd, says, with_info
from headrace.transport.messages import Submit
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]


def check(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers[REQUEST_ID]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    error: dict[str, Any] = body["error"]
    return error


async def test_what_the_router_refuses(front_end: FrontEnd) -> None:
    error = check(await front_end.http.get("/nothing/here"), 404, "not_found")
    assert error["message"] == "There is no route /nothing/here."
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"):
        error = check(await front_end.post(path, {}), 404, "not_found")
        assert error["message"] == f"There is no route {path}. Did you mean /v1/chat/completions?"
    response = await front_end.http.get("/v1/completions")
    assert "POST" in check(response, 405, "method_not_allowed")["message"]
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1,2]", b'"text"', b"5", b"null", b'{"prompt": NaN}', b'{"seed": 1e999}', b'{"prompt": "\xff"}',
     b'{"prompt": "\\ud800"}', b'{"prompt": "\\ud800 and more"}', b"[" * 100_000, b'{"seed": ' + b"9" * 6000 + b"}"],
    ids=range(13),
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/control/abort"])
async def test_what_is_no_json_object(front_end: FrontEnd, path: str, raw: bytes) -> None:
    response = await front_end.http.post(path, content=raw)
    check(response, 400, "invalid_json")


async def test_unknown_model(front_end: FrontEnd) -> None:
    assert "fake, alias" in check(await front_end.complete(model="gpt"), 404, "model_not_found", "model")["message"]
    check(await front_end.http.get("/v1/models/gpt"), 404, "model_not_found", "model")
    check(await front_end.post("/tokenize", {"model": "gpt", "prompt": "x"}), 404, "model_not_found", "model")
    assert (await front_end.complete(model="alias")).json()["model"] == "alias"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (QueueFull("1024 wait", retry_after_s=3), 429, "3"),
        (Unavailable("starting", code="starting"), 503, None),
        (Unavailable("dead", code="engine_dead"), 503, None),
    ],
    ids=["queue_full", "starting", "engine_dead"],
)
async def test_refused_by_admission(
    make: Make, error: RequestError, status: int, retry_after: str | None, stream: bool
) -> None:
    front_end = make(client=FakeClient(error=error))
    response = await front_end.complete(stream=stream)
    assert check(response, status, error.code)["message"] == error.message
    assert response.headers.get("retry-after") == retry_after
    metrics = front_end.app.state.context.metrics.render().decode()
    assert f'admission_rejections_total{{model_name="fake",reason="{error.code}"}} 1.0' in metrics


def ends_with(error: ErrorInfo | None, reason: FinishReason) -> Callable[[Submit], Iterable[list[Delta]]]:
    return lambda submit: [[Delta(0, finish_reason=reason, error=error)]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "reason", "status", "code"),
    [
        (DeadlineExceeded("3 s are over").info(), FinishReason.ABORT, 504, "deadline_exceeded"),
        (Unavailable("gone", code="engine_dead").info(), FinishReason.ERROR, 503, "engine_dead"),
        (None, FinishReason.ERROR, 500, "internal_error"),
    ],
)
async def test_ended_before_the_first_token(
    make: Make, error: ErrorInfo | None, reason: FinishReason, status: int, code: str, stream: bool
) -> None:
    front_end = make(client=FakeClient(script=ends_with(error, reason)))
    check(await front_end.complete(stream=stream), status, code)
    check(await front_end.chat(stream=stream), status, code)


async def test_draining_refuses_new_requests_alone(front_end: FrontEnd) -> None:
    front_end.lifecycle.drain()
    response = await front_end.complete()
    check(response, 503, "draining")
    assert response.headers["retry-after"]
    assert not front_end.client.streams
    assert (await front_end.http.get("/livez")).status_code == 200
    assert (await front_end.http.get("/v1/models")).status_code == 200


class _Broken(FakeClient):
    def submit(self, request: Submit) -> Any:
        raise ZeroDivisionError("secret detail")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_of_ours_is_a_500_whose_details_stay_in_the_log(
    make: Make, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    front_end = make(client=_Broken())
    response = await front_end.complete(stream=stream)
    assert response.headers[REQUEST_ID] in check(response, 500, "internal_error")["message"]
    assert "secret" not in response.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.headrace_fields["request_id"] == response.headers[REQUEST_ID]  # type: ignore[attr-defined]
    assert record.exc_info


async def test_body_over_the_limit_by_its_length(make: Make) -> None:
    front_end = make(admission={"max_body_bytes": 1000})
    response = await front_end.complete(prompt="x" * 2000)
    check(response, 413, "request_too_large")
    assert (await front_end.complete(prompt="x" * 100)).status_code == 200


async def test_body_over_the_limit_without_a_declared_length(make: Make) -> None:
    front_end = make(admission={"max_body_bytes": 1000})
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b"x" * 100

    check(await front_end.http.post("/v1/completions", content=chunks()), 413, "request_too_large")
    assert sent < 2000, "the rest was not read"


@pytest.mark.parametrize("value", ["x" * 129, "x" * 1_000_000, "a\tb", "caf\xe9", " x"])
async def test_a_bad_request_id_is_refused_and_not_echoed(front_end: FrontEnd, value: str) -> None:
    response = await front_end.http.get("/livez", headers=[(REQUEST_ID.encode(), value.encode("latin-1"))])
    if value == " x":  # the protocol itself strips this; what reaches us is refused
        assert response.status_code in (200, 400)
        return
    check(response, 400, "invalid_value", REQUEST_ID)
    assert len(response.headers[REQUEST_ID]) <= 128
    check(await front_end.complete(request_id=value), 400, "invalid_value", "request_id")


async def test_request_ids_are_kept_for_reply_and_abort(front_end: FrontEnd) -> None:
    response = await front_end.complete()
    own = response.headers[REQUEST_ID]
    assert len(own) == 32
    response = await front_end.complete(request_id=None)
    assert response.headers[REQUEST_ID] != own
    response = await front_end.post("/v1/completions", {"prompt": "x"}, headers={REQUEST_ID: "from header"})
    assert response.headers[REQUEST_ID] == "from header"
    assert response.json()["id"] == "cmpl-from header"
    assert "from header" in front_end.submit.aliases
    body = {"prompt": "x", "request_id": "from-body"}
    response = await front_end.post("/v1/completions", body, headers={REQUEST_ID: "from-header"})
    assert response.headers[REQUEST_ID] == "from-body"
    assert response.json()["id"] == "cmpl-from-body"


async def test_too_long_and_never_fitting_prompts(make: Make) -> None:
    error = check(await make().complete(prompt="x" * 300), 400, "context_length_exceeded", "prompt")
    assert "300" in error["message"]
    assert "256" in error["message"]
    small = make(client=with_info(num_blocks=8))  # 32 tokens of KV memory
    check(await small.complete(prompt="x" * 33), 400, "context_length_exceeded", "prompt")
    check(
        await small.chat(messages=[{"role": "user", "content": "x" * 33}]), 400, "context_length_exceeded", "messages"
    )
    assert (await small.complete(prompt="x" * 20)).status_code == 200


async def test_unknown_fields_are_named_in_a_header_or_refused(make: Make) -> None:
    response = await make().complete(temprature=1, **{"zz\n\x00 é": 2, "a": None})
    assert response.status_code == 200
    names = response.headers["x-headrace-unknown-fields"].split(",")
    assert names[:2] == ["a", "temprature"]
    assert len(names) == 3
    strict = make(admission={"strict_fields": True})
    check(await strict.complete(temprature=1), 400, "unknown_field", "temprature")
    assert (await strict.complete(user="me", metadata={"a": 1}, store=False)).status_code == 200


async def test_many_unknown_fields_make_no_long_header(front_end: FrontEnd) -> None:
    response = await front_end.complete(**{f"field{n}" * 50: n for n in range(500)})
    assert response.status_code == 200
    assert len(response.headers["x-headrace-unknown-fields"]) < 2000


LATER = {
    "guided_whitespace_pattern": " ?", "reasoning_max_tokens": 5, "thinking_token_budget": 5,
    "truncate_prompt_tokens": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        *((route, field, value) for route in ("chat", "complete") for field, value in LATER.items()),
        ("chat", "tool_choice", "required"),  # the fake model's tool calls have no form that is known
        ("chat", "tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("chat", "functions", []),
        ("chat", "modalities", ["text", "audio"]),
        *(("chat", field, "a+") for field in ("grammar", "ebnf", "regex", "json_schema")),  # never ignored in silence
        ("complete", "suffix", "end"),
        ("complete", "best_of", 3),
    ],
)
async def test_fields_of_later_parts_are_refused_by_name(
    front_end: FrontEnd, route: str, field: str, value: Any
) -> None:
    fields = {field: value}
    if field == "tool_choice":
        fields["tools"] = [{"type": "function", "function": {"name": "f"}}]
    response = await getattr(front_end, route)(**fields)
    assert field in check(response, 400, "unsupported_field", field)["message"]
    assert not front_end.client.streams


@pytest.mark.parametrize("tool", [{}, {"type": "retrieval"}, {"function": {"name": ""}}, {"function": [1]}])
async def test_tools_without_a_name_are_refused(front_end: FrontEnd, tool: Any) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    check(await front_end.chat(tools=[named, tool]), 400, "invalid_value", "tools[1]")
    assert (await front_end.chat(tools=[named, {"name": "templates know this too"}])).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "warm"}, "temperature must be a valid number, not 'warm'."),
        ({"stream": "yes"}, "stream must be a valid boolean, not 'yes'."),
        ({"prompt": None}, "but is missing or null."),
    ],
)
async def test_sentences_have_one_form(front_end: FrontEnd, fields: dict[str, Any], message: str) -> None:
    told = check(await front_end.complete(**fields), 400, "invalid_value", next(iter(fields)))["message"]
    assert told.endswith(message)


async def test_images_are_refused_by_path(front_end: FrontEnd) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    response = await front_end.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])
    check(response, 400, "unsupported_field", "messages[0].content[1]")


async def test_the_same_fields_as_null_or_text_are_fine(front_end: FrontEnd) -> None:
    nothing = dict.fromkeys(LATER) | {
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "modalities": ["text"],
    }
    assert (await front_end.chat(**nothing)).status_code == 200
    assert (await front_end.complete(best_of=1, suffix=None)).status_code == 200


async def test_a_client_that_leaves_while_sending_its_body_gets_nothing(front_end: FrontEnd) -> None:
    messages = [{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
             "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http", "root_path": "",
             "server": ("127.0.0.1", 80)}  # fmt: skip
    await asyncio.wait_for(front_end.app(scope, receive, send), 5)
    assert not front_end.client.streams


async def test_errors_in_a_stream_come_after_its_text(make: Make) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        yield [Delta(0, list(b"so far"))]
        error = Unavailable("the engine died", code="engine_dead").info()
        yield [Delta(0, list(b" so good"), finish_reason=FinishReason.ERROR, error=error)]

    front_end = make(client=FakeClient(script=script))
    response = await front_end.complete(stream=True)
    assert response.status_code == 200
    frames = response.text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    assert json.loads(frames[-2].removeprefix("data: ")) == {
        "error": {"message": "the engine died", "type": "unavailable", "param": None, "code": "engine_dead"}
    }
    assert '"finish_reason":"' not in response.text
    check(await front_end.complete(), 503, "engine_dead")


async def test_a_failure_of_ours_in_a_stream_is_an_error_frame(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        yield [Delta(0, list(b"ok"))]
        raise ZeroDivisionError("secret detail")

    front_end = make(client=FakeClient(script=script))
    response = await front_end.chat(stream=True)
    frames = response.text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    error = json.loads(frames[-2].removeprefix("data: "))["error"]
    assert error["code"] == "internal_error"
    assert response.headers[REQUEST_ID] in error["message"]
    assert "secret" not in response.text
    assert front_end.client.streams[0].closed == "error"
    assert any(record.exc_info for record in caplog.records)


async def test_one_failing_choice_fails_the_plain_reply_and_stops_the_others(make: Make) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        yield from list(says("ab")(submit))[:-1]
        yield [Delta(1, finish_reason=FinishReason.ERROR, error=None)]
        raise AssertionError("nobody reads on")

    front_end = make(client=FakeClient(script=script))
    check(await front_end.complete(n=3), 500, "internal_error")
    assert front_end.client.streams[0].closed == "error"
