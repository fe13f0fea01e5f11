"""What a reply says of the weights that made it, and of an end by a control operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.client.base import Delta
from headrace.testing.front_end import FakeClient, FrontEnd, events
from headrace.transport.messages import Submit
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]


def crossing(submit: Submit) -> Iterable[list[Delta]]:
    """Two tokens of one version, then three of the next, cut in the middle of a delta."""
    yield [Delta(0, list(b"a"), weights_versions=((0, "one"),))]
    yield [Delta(0, list(b"bcd"), weights_versions=((1, "two"),))]
    yield [Delta(0, list(b"e"), finish_reason=FinishReason.LENGTH)]


SPANS = [{"version": "one", "start": 0, "end": 2}, {"version": "two", "start": 2, "end": 5}]


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_a_request_that_crossed_a_refresh_has_spans(make: Make, ask: str) -> None:
    front_end = make(client=FakeClient(script=crossing))
    body = (await getattr(front_end, ask)()).json()
    assert body["weight_version"] == "two"
    assert body["choices"][0]["weight_versions"] == SPANS
    *others, last = events(await getattr(front_end, ask)(stream=True))
    assert last["weight_version"] == "two"
    assert last["choices"][0]["weight_versions"] == SPANS
    assert all("weight_version" not in other for other in others)


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_spans_end_where_a_stop_string_cuts(make: Make, ask: str) -> None:
    front_end = make(client=FakeClient(script=crossing))
    choice = (await getattr(front_end, ask)(stop=["d"])).json()["choices"][0]
    assert choice["weight_versions"] == [SPANS[0], {"version": "two", "start": 2, "end": 3}]
    choice = (await getattr(front_end, ask)(stop=["c"])).json()["choices"][0]
    assert "weight_versions" not in choice


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_what_a_control_operation_ends_comes_as_far_as_it_is(make: Make, ask: str) -> None:
    """What a trainer ends is a partial result, and its reason says so."""

    def script(submit: Submit) -> Iterable[list[Delta]]:
        yield [Delta(0, list(b"so"), weights_versions=((0, "one"),))]
        yield [Delta(0, finish_reason=FinishReason.ABORT)]

    front_end = make(client=FakeClient(script=script))
    response = await getattr(front_end, ask)()
    choice: dict[str, Any] = response.json()["choices"][0]
    assert (response.status_code, choice["finish_reason"]) == (200, "abort")
    assert (choice.get("text") or choice["message"]["content"]) == "so"
    *_, last = events(await getattr(front_end, ask)(stream=True))
    assert last["choices"][0]["finish_reason"] == "abort"


async def test_ended_before_its_first_token(make: Make) -> None:
    front_end = make(client=FakeClient(script=lambda _: [[Delta(0, finish_reason=FinishReason.ABORT)]]))
    body = (await front_end.complete(logprobs=1)).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "abort")
    assert body["weight_version"] is None
