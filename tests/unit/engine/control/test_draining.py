"""Draining: what comes is refused, what is there ends, and how it is ended itself."""

from __future__ import annotations

import pytest

from headrace.client.status import lifecycle_reasons
from headrace.errors import FailedRequest
from headrace.testing.harness import EngineHarness
from headrace.types import FinishReason

PROMPT = [3, 1, 4, 1, 5]


def test_what_is_there_ends_and_what_comes_is_refused() -> None:
    harness = EngineHarness(max_num_seqs=1)
    before = [harness.submit(PROMPT, max_tokens=5), harness.submit([7, 7], max_tokens=5, n=2)]
    harness.step()
    call = harness.start("drain")
    assert lifecycle_reasons(harness.lifecycles[-1]) == ("draining",)
    after = harness.submit([2, 2], max_tokens=3, n=2)
    while call not in harness.answers:
        harness.turn()
    done = harness.answers[call].result
    assert done is not None
    assert done["result"] == [{"rank": 0, "num_awaited": 3}]
    ends = [harness.choice(before[0]), *(harness.choice(before[1], choice) for choice in (0, 1))]
    assert [record.finish for record in ends] == [FinishReason.LENGTH] * 3
    for choice in (0, 1):
        record = harness.choice(after, choice)
        assert (record.token_ids, record.error_status, record.error_code) == ([], 503, "draining")
    harness.assert_idle()
    assert harness.core.lifecycle.is_draining, "until somebody says otherwise"
    assert harness.control("drain")["num_awaited"] == 0
    assert harness.control("undrain")["was_draining"] is True
    assert harness.control("undrain")["was_draining"] is False
    again = harness.submit(PROMPT, max_tokens=2)
    harness.run()
    assert harness.choice(again).finish is FinishReason.LENGTH


def test_past_its_deadline_it_says_what_is_left_and_still_refuses() -> None:
    harness = EngineHarness()
    harness.submit(PROMPT, max_tokens=40)
    call = harness.start("drain", timeout_s=5.0)
    harness.turn()
    harness.clock.advance(6.0)
    harness.turn()
    error = harness.answers[call].error
    assert error is not None
    assert error.status == 504
    assert "1 choices still run, of requests public-0-0" in error.message
    refused = harness.submit(PROMPT)
    harness.run()
    assert harness.choice(0).finish is FinishReason.LENGTH
    assert harness.choice(refused).error_code == "draining"


@pytest.mark.parametrize("way", ["undrain", "cancel"])
def test_one_that_waits_can_be_ended(way: str) -> None:
    harness = EngineHarness()
    harness.submit(PROMPT, max_tokens=40)
    call = harness.start("drain")
    harness.turn()
    harness.start(way)
    error = harness.answers[call].error
    assert error is not None
    assert error.code == "cancelled"
    assert not harness.core.lifecycle.is_draining
    later = harness.submit([7], max_tokens=2)
    harness.run()
    assert [harness.choice(request).finish for request in (0, later)] == [FinishReason.LENGTH] * 2


def test_undrain_ends_no_other_operation() -> None:
    harness = EngineHarness()
    harness.submit(PROMPT, max_tokens=40)
    call = harness.start("pause", mode="wait")
    with pytest.raises(FailedRequest) as caught:
        harness.control("undrain")
    assert caught.value.code == "operation_running"
    harness.start("cancel")
    assert call in harness.answers


def test_requests_that_cannot_end_are_not_waited_for() -> None:
    harness = EngineHarness()
    harness.control("pause", mode="keep")
    held = harness.submit(PROMPT)
    with pytest.raises(FailedRequest, match="resume, or abort"):
        harness.control("drain")
    assert not harness.core.lifecycle.is_draining
    harness.abort(held)
    harness.record(harness.core.take_outputs())
    assert harness.control("drain")["num_awaited"] == 0
    assert harness.core.lifecycle.is_paused, "a flag of its own"
    assert harness.control("resume")["was_paused"] is True
    assert harness.core.lifecycle.is_draining
