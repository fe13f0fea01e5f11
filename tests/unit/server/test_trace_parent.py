"""Whose trace a request belongs to, on its way to the engine and in the log, with tracing switched off."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from headrace.errors import Conflict
from headrace.testing.front_end import FrontEnd

Make = Callable[..., FrontEnd]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
MALFORMED = {"traceparent": "00-1234-5678-01"}


@pytest.mark.parametrize("path", ["/v1/control/pause", "/pause_generation", "/pause", "/v1/pause"])
async def test_operations_know_their_caller_s_trace(front_end: FrontEnd, path: str) -> None:
    for headers, expected in ((HEADERS, HEADERS["traceparent"]), (MALFORMED, None), ({}, None)):
        front_end.client.trace_parents.clear()
        assert (await front_end.post(path, {}, headers=headers)).status_code == 200
        assert expected in front_end.client.trace_parents
        assert {None, expected} >= set(front_end.client.trace_parents)


async def test_an_abort_s_object_has_it(front_end: FrontEnd) -> None:
    reply = (await front_end.post("/v1/control/abort", {"all": True}, headers=HEADERS)).json()
    assert (reply["trace_id"], reply["deadline"]) == (TRACE_ID, None)


async def test_log_lines_have_trace_and_error(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    front_end = make()
    caplog.set_level(logging.INFO, "headrace.server.middleware")
    front_end.client.controlled.errors["resume"] = Conflict("no", code="operation_running")
    await front_end.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, headers=HEADERS)
    await front_end.post("/v1/completions", {"prompt": "Hi", "n": 0})
    await front_end.post("/v1/control/resume", {})
    await front_end.post("/continue_generation", {}, headers=MALFORMED)
    lines = [record.headrace_fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["trace_id"] for line in lines] == [TRACE_ID, None, None, None]
    assert [line.get("error") for line in lines] == [None, "invalid_value", "operation_running", "operation_running"]
    assert lines[0]["weights_version"] == "step-7"
