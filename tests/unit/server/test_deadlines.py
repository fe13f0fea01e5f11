"""Time limits in headers: what reaches the engine, on every route that generates, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.testing.front_end import FrontEnd

Make = Callable[..., FrontEnd]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 4, "model": "fake"},
    "/v1/responses": {"input": "Hi"},
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_headers_limit_any_route_that_generates(front_end: FrontEnd, path: str) -> None:
    headers = {"X-Request-Timeout": "20", "X-Queue-Timeout": "1.5"}
    assert (await front_end.post(path, ROUTES[path], headers=headers)).status_code == 200
    assert (front_end.submit.timeout_s, front_end.submit.queue_timeout_s) == (20, 1.5)
    assert (await front_end.post(path, ROUTES[path])).status_code == 200
    assert (front_end.submit.timeout_s, front_end.submit.queue_timeout_s) == (None, None)


@pytest.mark.parametrize(("header", "body", "expected"), [("5", 9, 5), ("9", 5, 5), (None, 5, 5), ("5", None, 5)])
async def test_the_shorter_of_body_and_header_holds(
    front_end: FrontEnd, header: str | None, body: float | None, expected: float
) -> None:
    headers = {} if header is None else {"X-Request-Timeout": header}
    await front_end.post("/v1/completions", {"prompt": "Hi", "timeout_s": body}, headers=headers)
    assert front_end.submit.timeout_s == expected


async def test_the_servers_limits_are_for_those_who_bring_none(make: Make) -> None:
    front_end = make(admission={"default_timeout_s": 9.0, "default_queue_timeout_s": 2.0})
    await front_end.complete()
    assert (front_end.submit.timeout_s, front_end.submit.queue_timeout_s) == (9, 2)
    await front_end.post("/v1/completions", {"prompt": "Hi"}, headers={"X-Queue-Timeout": "30"})
    assert (front_end.submit.timeout_s, front_end.submit.queue_timeout_s) == (9, 30)


@pytest.mark.parametrize("name", ["X-Request-Timeout", "X-Queue-Timeout"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e300", "5s"])
async def test_what_is_no_time_is_refused_by_the_headers_name(front_end: FrontEnd, name: str, value: str) -> None:
    response = await front_end.post("/v1/completions", {"prompt": "Hi"}, headers={name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert not front_end.client.streams
