"""How choices start and end: limits, refusals, stop rules, deadlines, aborts in every state, single failures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError
from headrace.testing.harness import EngineHarness
from headrace.testing.strict import StrictExecutor, expected_output
from headrace.transport.messages import Abort, Submit
from headrace.types import FinishReason, RequestId, SamplingParams, ThinkingBudget

# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1, 64], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        (["a"], {}, "prompt"),
        ([1, 2**70], {}, "prompt"),
        ([1], {"temperature": "hot"}, None),
        ([1], {"n": 0}, "n"),
        ([1], {"n": 10**9}, "n"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": math.nan}, "temperature"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty"),
        ([1], {"presence_penalty": math.inf}, "presence_penalty"),
        ([1], {"top_k": -2}, "top_k"),
        ([1], {"logprobs": -2}, "logprobs"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"logit_bias": {64: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {1: math.nan}}, "logit_bias"),
        ([1], {"stop_token_ids": (2**31,)}, "stop_token_ids"),
        ([1], {"bad_words_token_ids": ((),)}, "bad_words_token_ids"),
        ([1], {"bad_words_token_ids": ((1, 99),)}, "bad_words_token_ids"),
        ([1], {"thinking": ThinkingBudget(True, (1,), (99,), 0)}, "thinking"),
        ([1], {"thinking": ThinkingBudget(True, (1,), (), 0)}, "thinking"),
        ([1], {"thinking": ThinkingBudget(True, (1,), (2,), -1)}, "thinking"),
        ([1], {"timeout_s": math.nan}, "timeout_s"),
        ([1], {"pooling": "cls"}, "pooling"),
        ([1], {"pooling": "last"}, "pooling"),  # this executor gives none
    ],
)
def test_a_bad_request_is_refused_and_hurts_nobody(
    prompt: list[Any], fields: dict[str, Any], param: str | None
) -> None:
    harness = EngineHarness()
    good = harness.submit([1, 2, 3])
    harness.step()
    bad = harness.submit(prompt, **fields)
    harness.step()
    record = harness.choice(bad)
    assert record.finish is FinishReason.ERROR
    error = record.details[0].error
    assert error is not None
    assert (error.status, error.param) == (400, param)
    harness.run()
    assert harness.choice(good).token_ids == expected_output([1, 2, 3], 4, frozenset(), 64)


def test_every_choice_of_a_refused_request_hears_of_it() -> None:
    harness = EngineHarness()
    bad = harness.submit([1], [], n=3)
    harness.step()
    assert [harness.choice(bad, choice).finish for choice in range(6)] == [FinishReason.ERROR] * 6
    harness.assert_idle()


def test_a_prompt_larger_than_the_memory_is_refused_at_once() -> None:
    harness = EngineHarness(num_blocks=8, block_size=4, max_model_len=64)
    others = harness.submit([1, 2], max_tokens=2)
    too_long = harness.submit([1] * 33)
    harness.step()
    record = harness.choice(too_long)
    assert (record.error_status, record.error_code) == (400, "context_length_exceeded")
    error = record.details[0].error
    assert error is not None
    assert "33" in error.message
    assert "32" in error.message
    harness.run()
    assert harness.choice(others).finish is FinishReason.LENGTH


def test_a_prompt_and_min_tokens_must_stay_within_the_context() -> None:
    harness = EngineHarness(max_model_len=16)
    fits = harness.submit([1] * 15, max_tokens=None)
    too_long = harness.submit([1] * 16)
    too_many = harness.submit([1] * 10, min_tokens=6)
    harness.run()
    assert len(harness.choice(fits).token_ids) == 1
    for request in (too_long, too_many):
        assert harness.choice(request).error_code == "context_length_exceeded"


def test_a_live_request_id_is_not_taken_twice() -> None:
    harness = EngineHarness()
    request = harness.submit([1, 2], max_tokens=3)
    harness.submit([3], request_id=request)
    other_client = harness.submit([4], request_id=request, client=1, max_tokens=1)
    harness.run()
    assert harness.num_conflicts == 1
    assert harness.choice(request).token_ids == expected_output([1, 2], 3, frozenset(), 64)
    assert harness.choice(other_client, client=1).finish is FinishReason.LENGTH
    harness.submit([5], request_id=request, client=1)  # free again after its end
    assert harness.num_conflicts == 1


# -------------------------------------------------------------------------------------------------------- finish rules


def test_output_is_clamped_to_the_model_and_the_memory() -> None:
    for fields in ({"max_model_len": 12}, {"num_blocks": 3, "block_size": 4}):
        harness = EngineHarness(**fields)
        request = harness.submit([1, 2, 3], max_tokens=1000)
        unlimited = harness.submit([1, 2, 3], max_tokens=None)
        harness.run()
        for it in (request, unlimited):
            assert len(harness.choice(it).token_ids) == 9
            assert harness.choice(it).finish is FinishReason.LENGTH
        harness.assert_idle()


def test_eos_and_stop_ids_end_it_with_the_token_delivered() -> None:
    prompt = [3, 1, 4]
    free = expected_output(prompt, 30, frozenset(), 64)
    eos, stop = free[4], free[2]
    harness = EngineHarness(eos_token_ids=(eos,))
    by_eos = harness.submit(prompt, max_tokens=30, ignore_eos=False)
    by_id = harness.submit(prompt, max_tokens=30, stop_token_ids=(stop,))
    ignoring = harness.submit(prompt, max_tokens=7)
    both = harness.submit(prompt, max_tokens=free.index(stop) + 1, stop_token_ids=(stop,))
    later = harness.submit(prompt, max_tokens=30, stop_token_ids=(stop, free[3]), min_tokens=free.index(stop) + 1)
    harness.run()
    record = harness.choice(by_eos)
    assert (record.finish, record.stop_token_id) == (FinishReason.STOP, eos)
    assert record.token_ids == free[: free.index(eos) + 1]
    record = harness.choice(by_id)
    assert (record.finish, record.stop_token_id) == (FinishReason.STOP, stop)
    assert record.token_ids == free[: free.index(stop) + 1]
    assert harness.choice(ignoring).token_ids == free[:7]
    assert harness.choice(ignoring).stop_token_id is None
    assert harness.choice(both).finish is FinishReason.STOP
    assert len(harness.choice(later).token_ids) > free.index(stop) + 1


def test_logprobs_travel_with_their_token() -> None:
    harness = EngineHarness()
    request = harness.submit([1, 2], logprobs=0, max_tokens=3)
    harness.run()
    rows = [detail.logprobs for detail in harness.choice(request).details]
    assert [int(row.arrays()[0][0, 0]) for row in rows if row is not None] == harness.choice(request).token_ids


def test_times_are_told_once_with_the_first_token() -> None:
    harness = EngineHarness(max_num_seqs=1, max_num_batched_tokens=2)
    harness.submit([9], max_tokens=1)
    request = harness.submit([1, 2, 3], max_tokens=3)
    harness.clock.advance(2.0)
    harness.step()
    harness.clock.advance(1.0)
    harness.step()
    harness.clock.advance(0.5)
    harness.run()
    told = [detail for detail in harness.choice(request).details if detail.queue_s is not None]
    assert [(detail.queue_s, detail.prefill_s) for detail in told] == [(3.0, 0.5)]


# ---------------------------------------------------------------------------------------------- deadlines and failures


def test_a_deadline_ends_waiting_and_running_alike() -> None:
    harness = EngineHarness(max_num_seqs=1)
    running = harness.submit([1], max_tokens=50, timeout_s=5.0)
    harness.step()
    waiting = harness.submit([2], max_tokens=50, timeout_s=4.0, n=2)
    patient = harness.submit([3], max_tokens=2)
    harness.clock.advance(4.5)
    harness.step()
    for choice in range(2):
        record = harness.choice(waiting, choice)
        assert (record.finish, record.error_status) == (FinishReason.ERROR, 504)
    assert harness.choice(running).finish is None
    harness.clock.advance(0.5)
    harness.step()
    assert harness.choice(running).error_code == "deadline_exceeded"
    assert len(harness.choice(running).token_ids) == 2
    harness.run()
    assert harness.choice(patient).finish is FinishReason.LENGTH
    harness.assert_idle()


def test_one_that_waits_for_too_long_ends_and_one_that_was_started_runs_on() -> None:
    harness = EngineHarness(max_num_seqs=1)
    started = harness.submit([1], max_tokens=50, queue_timeout_s=1.0, timeout_s=9.0)
    harness.step()
    waiting = harness.submit([2], max_tokens=50, queue_timeout_s=4.0, n=2)
    hurried = harness.submit([3], max_tokens=50, queue_timeout_s=40.0, timeout_s=5.0)
    harness.clock.advance(3.5)
    harness.step()
    assert harness.choice(waiting).finish is None
    harness.clock.advance(0.5)
    harness.step()
    for choice in range(2):
        record = harness.choice(waiting, choice)
        assert (record.error_status, record.error_code) == (504, "queue_timeout")
    assert harness.choice(hurried).finish is None
    harness.clock.advance(1.0)
    harness.step()
    assert harness.choice(hurried).error_code == "deadline_exceeded"
    assert harness.choice(started).finish is None
    harness.clock.advance(4.0)
    harness.step()
    assert harness.choice(started).error_code == "deadline_exceeded"
    harness.assert_idle()


def test_a_request_of_which_a_choice_runs_has_waited_long_enough() -> None:
    harness = EngineHarness(max_num_seqs=1)
    request = harness.submit([1], max_tokens=3, n=3, queue_timeout_s=1.0)
    harness.step()
    harness.clock.advance(5.0)
    harness.run()
    assert [harness.choice(request, choice).finish for choice in range(3)] == [FinishReason.LENGTH] * 3
    held = EngineHarness()
    held.control("pause", mode="keep")
    request = held.submit([1], queue_timeout_s=1.0)
    held.clock.advance(2.0)
    held.turn()
    assert held.choice(request).error_code == "queue_timeout", "behind a pause it waits too"


def test_one_failing_sequence_ends_alone_and_leaves_no_cache_behind() -> None:
    prompt = [1, 2, 3, 4, 5]
    harness = EngineHarness(fail_token_id=expected_output(prompt, 3, frozenset(), 64)[2])
    failing = harness.submit(prompt, max_tokens=20)
    other = harness.submit([9, 9, 9], max_tokens=2)
    harness.run()
    record = harness.choice(failing)
    assert (record.finish, record.error_status, len(record.token_ids)) == (FinishReason.ERROR, 500, 2)
    assert harness.choice(other).finish is FinishReason.LENGTH
    assert harness.core._kv.num_cached == 1  # the other's: a full block of [9, 9, 9, x]
    harness.assert_idle()


# -------------------------------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("state", ["waiting", "follower", "prefill", "decoding", "preempted", "finished", "unknown"])
@pytest.mark.parametrize("how", ["id", "name", "alias", "all", "client"])
def test_abort_finds_the_request_in_every_state(state: str, how: str) -> None:
    harness = EngineHarness(
        num_blocks=6, block_size=4, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=24, prefix_caching=False
    )
    fields: dict[str, Any] = {"client": 1, "aliases": ("mine",), "request_id": 77}
    if state == "waiting":
        harness.submit([1], max_tokens=20)
        harness.submit([2], max_tokens=20)
        harness.step()
        harness.submit([3, 3], **fields)
    elif state == "follower":
        harness.submit([3] * 9, n=2, **fields)
        harness.step()
        assert harness.abort(77, client=1, choice=0) == 1
        assert harness.core.stats().num_waiting == 1
    elif state == "prefill":
        harness.submit([3] * 9, **fields)
        harness.step()
    elif state == "decoding":
        harness.submit([3], max_tokens=9, **fields)
        harness.step(3)
    elif state == "preempted":
        harness.submit([1] * 3, max_tokens=20)
        harness.submit([3] * 3, max_tokens=20, **fields)
        while not harness.core.stats().num_preemptions:
            harness.step()
    elif state == "finished":
        harness.submit([3], max_tokens=1, **fields)
        harness.step()
    num_others = sum(request.client != 1 for request in harness.core._registry)
    is_alive = state not in ("finished", "unknown")

    def abort() -> int:
        if how == "id":
            return harness.abort(77, client=1)
        if how == "client":
            return harness.core.abort_client(1)
        return harness.abort(names={"name": ("public-1-77",), "alias": ("mine", "x")}.get(how))

    expected = is_alive + (num_others if how == "all" else 0)
    assert abort() == expected
    assert abort() == 0
    harness.core.check_invariants()
    harness.run()
    if is_alive and how != "client":
        last = harness.choice(77, 1 if state == "follower" else 0, client=1)
        assert last.finish is FinishReason.ABORT
        assert last.error_code is None
    harness.assert_idle()


def test_an_abort_frees_the_blocks_at_once() -> None:
    harness = EngineHarness(num_blocks=4, block_size=4, prefix_caching=False)
    harness.submit([1] * 13, max_tokens=2)
    harness.step()
    assert harness.core.stats().num_free_blocks == 0
    harness.abort()
    assert harness.core.stats().num_free_blocks == 4
    harness.submit([2] * 12, max_tokens=1)
    harness.step()
    assert harness.executor.plans[-1].released == [0]
    harness.run()


def test_ids_are_the_senders_own_and_names_are_everybodys() -> None:
    harness = EngineHarness()
    harness.submit([1], request_id=5, client=0)
    harness.submit([1], request_id=5, client=1)
    assert harness.abort(5, client=2) == 0
    assert harness.abort(client=2, names=("public-1-5",)) == 1
    assert harness.abort(5, client=0) == 1
    harness.run()
    harness.assert_idle()


def test_the_servers_own_abort_is_an_error_to_the_sender() -> None:
    harness = EngineHarness()
    theirs = harness.submit([1], max_tokens=9)
    ours = harness.submit([2], max_tokens=9)
    harness.abort(theirs, reason="stop_string")
    harness.abort(ours, reason="operator")
    harness.run()
    assert harness.choice(theirs).error_code is None
    record = harness.choice(ours)
    assert (record.finish, record.error_status, record.error_code) == (FinishReason.ABORT, 503, "aborted")


def test_two_thousand_requests_with_aborts_leave_nothing() -> None:
    harness = EngineHarness(num_blocks=40, block_size=4)
    core = harness.core
    for i in range(2000):
        core.submit(0, _message(i))
        if i % 3 == 0:
            core.step()
        if i % 2:
            harness.core.abort(0, _abort(i - i % 7))
    while core.has_work:
        core.step()
    harness.assert_idle()
    assert len(core._registry) == 0
    assert not core._registry._by_name


def _message(i: int) -> Submit:
    params = SamplingParams(max_tokens=1 + i % 9, seed=i, n=1 + i % 2, ignore_eos=True)
    return Submit(
        request_id=RequestId(i), public_id=f"r{i}", prompts=((1, 2, 3 + i % 5),), params=params, timeout_s=60.0
    )


def _abort(i: int) -> Abort:
    return Abort(call_id=i, request_ids=(RequestId(i),))


# ------------------------------------------------------------------------------------------------- --------- options


@pytest.mark.parametrize("scheduler", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"priority_ageing_s": -1.0}])
def test_options_that_cannot_work_are_refused(scheduler: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineCore(StrictExecutor(), CacheConfig(num_kv_blocks=8), SchedulerConfig(**scheduler))


def test_the_executor_is_told_what_the_engine_announces() -> None:
    harness = EngineHarness(num_blocks=9, block_size=4, max_num_seqs=3)
    info = harness.core.info
    assert (info.num_blocks, info.block_size, info.max_num_seqs) == (9, 4, 3)
    executor = harness.executor
    assert (executor._num_blocks, executor._block_size, executor._max_num_seqs) == (9, 4, 3)
    assert info.has_prefix_cache
    assert not EngineHarness(prefix_caching=False).core.info.has_prefix_cache
