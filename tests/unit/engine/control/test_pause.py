"""Pausing and sleeping: what becomes of requests in each mode, on an executor that checks every plan."""

from __future__ import annotations

import pytest

from headrace.errors import FailedRequest
from headrace.testing.harness import EngineHarness
from headrace.testing.strict import expected_output
from headrace.types import FinishReason

PROMPT = [3, 1, 4, 1, 5]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return expected_output(prompt, max_tokens, frozenset(), 64)


def test_abort_ends_what_runs_with_what_it_has() -> None:
    harness = EngineHarness()
    running = harness.submit(PROMPT, max_tokens=30)
    harness.step(4)
    waiting = harness.submit([9], [8], max_tokens=30, n=2)
    assert harness.control("pause", mode="abort") == {"rank": 0, "aborted": 5}
    record = harness.choice(running)
    assert (record.finish, record.error_code) == (FinishReason.ABORT, None)
    assert record.token_ids == expected(PROMPT, 30)[:4]
    assert harness.choice(waiting, 3).finish is FinishReason.ABORT
    assert not harness.core.has_work
    assert harness.core.lifecycle.pause_mode == "abort"


def test_wait_drains_what_came_before_and_holds_what_comes_after() -> None:
    """The barrier covers everything that was accepted before it, and nothing else."""
    harness = EngineHarness(max_num_seqs=1)
    before = [harness.submit(PROMPT, max_tokens=5), harness.submit([7, 7], max_tokens=5)]
    harness.step()
    call = harness.start("pause", mode="wait")
    after = harness.submit([2, 2], max_tokens=3)
    while call not in harness.answers:
        harness.turn()
    assert [harness.choice(request).finish for request in before] == [FinishReason.LENGTH] * 2
    assert harness.choice(after).token_ids == []
    for _ in range(3):
        harness.turn()
    assert harness.choice(after).token_ids == []
    harness.control("resume")
    harness.run()
    assert harness.choice(after).token_ids == expected([2, 2], 3)


def test_keep_freezes_and_goes_on_with_the_same_tokens() -> None:
    harness = EngineHarness()
    request = harness.submit(PROMPT, max_tokens=12)
    harness.step(3)
    harness.control("pause", mode="keep")
    num_plans = len(harness.executor.plans)
    for _ in range(5):
        harness.turn()
    assert len(harness.executor.plans) == num_plans
    assert harness.core.stats().num_running == 1
    harness.control("resume")
    harness.run()
    assert harness.choice(request).token_ids == expected(PROMPT, 12)
    assert harness.executor.plans[num_plans].num_tokens == [1], "nothing was computed twice"


def test_pause_and_resume_are_idempotent() -> None:
    harness = EngineHarness()
    assert harness.control("resume")["was_paused"] is False
    harness.control("pause", mode="keep")
    request = harness.submit(PROMPT, max_tokens=2)
    assert harness.control("pause", mode="abort")["aborted"] == 1
    assert harness.choice(request).finish is FinishReason.ABORT
    assert harness.control("resume")["was_paused"] is True
    assert harness.core.lifecycle.is_serving


def test_a_held_request_keeps_its_deadline() -> None:
    harness = EngineHarness()
    harness.control("pause", mode="keep")
    request = harness.submit(PROMPT, [1], timeout_s=2.0)
    harness.clock.advance(3.0)
    harness.turn()
    assert [harness.choice(request, choice).error_code for choice in (0, 1)] == ["deadline_exceeded"] * 2
    harness.control("resume")
    assert not harness.core.has_work


def test_held_choices_of_one_prompt_share_its_prefill_after_the_pause() -> None:
    harness = EngineHarness()
    harness.control("pause", mode="keep")
    request = harness.submit(PROMPT, max_tokens=3, n=3)
    harness.abort(request, choice=0)
    harness.record(harness.core.take_outputs())
    harness.control("resume")
    harness.run()
    assert harness.choice(request, 0).finish is FinishReason.ABORT
    assert [harness.choice(request, choice).token_ids for choice in (1, 2)] == [expected(PROMPT, 3)] * 2


def test_a_drain_that_takes_too_long_names_what_is_left_and_lets_go() -> None:
    harness = EngineHarness()
    harness.submit(PROMPT, max_tokens=40)
    call = harness.start("pause", mode="wait", timeout_s=5.0)
    held = harness.submit([2], max_tokens=1)
    harness.turn()
    assert harness.choice(held).finish is None
    harness.clock.advance(6.0)
    harness.turn()
    error = harness.answers[call].error
    assert error is not None
    assert error.status == 504
    assert "1 choices still run, of requests public-0-0" in error.message
    assert harness.core.lifecycle.is_serving
    harness.run()
    assert harness.choice(held).finish is FinishReason.LENGTH


def test_a_second_operation_is_told_of_the_first_and_queries_are_not_held_up() -> None:
    harness = EngineHarness()
    harness.submit(PROMPT, max_tokens=20)
    harness.step()
    call = harness.start("pause", mode="wait")
    with pytest.raises(FailedRequest) as caught:
        harness.control("resume")
    assert (caught.value.info().status, caught.value.info().code) == (409, "operation_running")
    status = harness.control("status")
    assert status["operation"]["kind"] == "pause"
    assert status["operation"]["id"] in caught.value.message
    assert (status["num_running"], status["is_paused"]) == (1, False)
    cancelled = harness.answers[harness.start("cancel", id=status["operation"]["id"])].result
    assert cancelled is not None
    assert cancelled["state"] == "cancelled"
    error = harness.answers[call].error
    assert error is not None
    assert error.code == "cancelled"
    assert harness.core.lifecycle.is_serving
    kept = harness.control("operations")["operations"]
    assert [(it["kind"], it["state"]) for it in kept] == [("pause", "cancelled")]


def test_an_operation_that_nobody_waits_for_is_found_later() -> None:
    harness = EngineHarness()
    call = harness.start("pause", mode="keep", wait=False)
    answer = harness.answers[call].result
    assert answer is not None
    found = harness.control("operations", id=answer["id"])["operations"]
    assert [it["state"] for it in found] == ["succeeded"]
    with pytest.raises(FailedRequest, match="There is no operation"):
        harness.control("operations", id="op-none")


@pytest.mark.parametrize(
    ("operation", "arguments", "part"),
    [
        ("fly", {}, "There is no control operation 'fly'"),
        ("pause", {"mode": "stop"}, "Invalid enum value 'stop'"),
        ("pause", {"moode": "abort"}, "unknown field `moode`"),
        ("sleep", {"tags": ["memory"]}, "Invalid enum value 'memory'"),
        ("resume", {"mode": "abort"}, "unknown field `mode`"),
        ("apply_refresh", {"source": {"kind": "path"}}, "No refresh is open"),
        ("refresh_weights", {"source": {"kind": "ftp"}}, "Invalid enum value 'ftp'"),
        ("operations", {"number": 3}, "operations takes id"),
    ],
)
def test_wrong_calls_say_what_is_wrong(operation: str, arguments: dict[str, object], part: str) -> None:
    harness = EngineHarness()
    with pytest.raises(FailedRequest, match=part):
        harness.control(operation, **arguments)
    assert harness.core.lifecycle.is_serving


def test_every_change_is_told_once() -> None:
    harness = EngineHarness()
    harness.control("pause", mode="keep")
    harness.control("pause", mode="keep")
    harness.control("sleep")
    harness.control("wake")
    assert [(it.state, it.pause_mode) for it in harness.lifecycles] == [
        ("ready", "keep"),
        ("asleep", "keep"),
        ("asleep", "keep"),  # the KV memory is back
        ("poisoned", "keep"),
    ]


# ------------------------------------------------------------------------------------------------------------- sleeping


def test_sleep_ends_or_freezes_and_gives_memory_back() -> None:
    harness = EngineHarness()
    request = harness.submit(PROMPT, max_tokens=9)
    harness.step(4)
    result = harness.control("sleep", tags=["kv_cache"], mode="keep")
    assert result["tags"] == ["kv_cache"]
    assert not harness.executor.has_kv
    assert harness.core.lifecycle.state == "asleep"
    harness.control("wake")
    harness.run()
    assert harness.choice(request).token_ids == expected(PROMPT, 9)
    assert harness.choice(request).details[-1].num_preemptions == 1, "its KV was given up"


def test_sleep_and_wake_are_idempotent_and_partial() -> None:
    harness = EngineHarness()
    assert harness.control("wake")["tags"] == []
    harness.control("sleep", tags=["kv_cache"])
    assert harness.control("sleep", tags=["kv_cache"])["freed_bytes"] == 0
    harness.control("sleep", tags=["weights"])
    assert harness.core.lifecycle.asleep == ("weights", "kv_cache")
    harness.control("wake", tags=["kv_cache"])
    assert harness.core.lifecycle.state == "asleep"
    assert harness.control("wake", tags=["kv_cache"])["tags"] == []


def test_waking_drops_the_prefix_index() -> None:
    harness = EngineHarness()
    prompt = list(range(1, 14))
    harness.submit(prompt, max_tokens=1)
    harness.run()
    harness.control("sleep", tags=["kv_cache"])
    harness.control("wake")
    again = harness.submit(prompt, max_tokens=1)
    harness.run()
    assert harness.choice(again).num_cached_tokens == 0


@pytest.mark.parametrize("holds", [False, True])
def test_requests_while_asleep_are_refused_or_wait(holds: bool) -> None:
    harness = EngineHarness(holds_while_asleep=holds)
    harness.control("sleep", tags=["kv_cache"])
    request = harness.submit(PROMPT, max_tokens=2)
    harness.turn()
    record = harness.choice(request)
    if not holds:
        assert (record.finish, record.error_status, record.error_code) == (FinishReason.ERROR, 503, "asleep")
        return
    assert record.finish is None
    harness.control("wake")
    harness.run()
    assert record.token_ids == expected(PROMPT, 2)
