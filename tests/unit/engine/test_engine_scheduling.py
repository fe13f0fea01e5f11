"""Who runs when: budgets, chunks, memory pressure, priorities and ageing, siblings of one prompt."""

from __future__ import annotations

import pytest

from headrace.testing.harness import EngineHarness
from headrace.testing.strict import expected_output
from headrace.types import FinishReason


def preempted(harness: EngineHarness) -> list[int]:
    """Request ids that have been preempted at least once and are alive."""
    return [r.request_id for r in harness.core._registry if any(s.num_preemptions for s in r.sequences)]


def running(harness: EngineHarness) -> list[tuple[int, int]]:
    return [(seq.request.request_id, seq.choice) for seq in harness.core._scheduler.running.values()]


# ----------------------------------------------------------------------------------------------------- chunked prefill


def test_a_decode_gets_a_token_in_every_step_of_a_long_prefill() -> None:
    harness = EngineHarness(max_num_batched_tokens=8, max_model_len=200, num_blocks=100)
    short = harness.submit([1, 2, 3], max_tokens=30)
    harness.step()
    long = harness.submit(list(range(60)), max_tokens=1)
    for already in range(1, 9):
        assert len(harness.choice(short).token_ids) == already
        assert harness.choice(long).token_ids == []
        harness.step()
        assert harness.executor.plans[-1].num_tokens == [1, 7][: 2 if already < 9 else 1]
    harness.step()
    assert len(harness.choice(long).token_ids) == 1
    assert harness.choice(long).finish is FinishReason.LENGTH


def test_full_slots_of_decodes_leave_a_prefill_its_token() -> None:
    harness = EngineHarness(max_num_seqs=9, max_num_batched_tokens=4)
    assert harness.core.info.max_num_seqs == 4
    decodes = [harness.submit([5], max_tokens=40) for _ in range(3)]
    harness.step(2)
    prefill = harness.submit(list(range(10)), max_tokens=1)
    harness.step(10)
    assert harness.choice(prefill).finish is FinishReason.LENGTH
    assert all(len(harness.choice(request).token_ids) == 12 for request in decodes)


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_chunks_do_not_change_the_output(budget: int) -> None:
    harness = EngineHarness(max_num_batched_tokens=budget)
    prompt = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 11]
    request = harness.submit(prompt, max_tokens=9, prompt_logprobs=0)
    harness.run()
    assert harness.choice(request).token_ids == expected_output(prompt, 9, frozenset(), 64)
    assert harness.choice(request).scored_ids == prompt[1:]


# ---------------------------------------------------------------------------------------------------------- preemption


def test_the_newest_is_preempted_first_and_comes_back_first() -> None:
    harness = EngineHarness(num_blocks=6, block_size=4, prefix_caching=False, max_model_len=24)
    first = harness.submit([1] * 3, max_tokens=18)
    second = harness.submit([2] * 3, max_tokens=18)
    third = harness.submit([3] * 3, max_tokens=18)
    late = harness.submit([4] * 3, max_tokens=2)
    order = []
    while harness.core.has_work:
        harness.step()
        for request in preempted(harness):
            if request not in order:
                order.append(request)
        if harness.choice(late).token_ids:
            # Who was preempted is never overtaken by who still waits.
            assert all(harness.choice(request).token_ids for request in (second, third))
    assert order[:2] == [third, second]
    assert first not in order
    for prompt, request in ((1, first), (2, second), (3, third)):
        assert harness.choice(request).token_ids == expected_output([prompt] * 3, 18, frozenset(), 64)
    assert harness.choice(third).details[-1].num_preemptions >= 1
    harness.assert_idle()


def test_the_lower_priority_is_preempted_before_the_newer() -> None:
    harness = EngineHarness(num_blocks=4, block_size=4, prefix_caching=False, max_model_len=16)
    humble = harness.submit([1] * 3, max_tokens=10, priority=5)
    harness.step()
    urgent = harness.submit([2] * 3, max_tokens=10, priority=0)
    while not harness.core.stats().num_preemptions:
        harness.step()
    assert preempted(harness) == [humble]
    assert running(harness) == [(urgent, 0)]
    harness.run()


def test_victims_queue_oldest_first() -> None:
    harness = EngineHarness(num_blocks=8, block_size=4, prefix_caching=False, max_model_len=30)
    requests = [harness.submit([i + 1] * 4, max_tokens=1 + 20) for i in range(4)]
    harness.step(2)
    while len(preempted(harness)) < 2:
        harness.step()
    queued = [seq.request.request_id for seq in harness.core._scheduler._queue]  # type: ignore[attr-defined]
    assert queued == [requests[2], requests[3]]
    harness.run()


# ------------------------------------------------------------------------------------------------- priority and ageing


def test_urgent_ones_overtake_in_the_queue() -> None:
    harness = EngineHarness(max_num_seqs=1)
    harness.submit([9], max_tokens=2)
    harness.step()
    normal = harness.submit([1], max_tokens=1)
    urgent = harness.submit([2], max_tokens=1, priority=-1)
    harness.step(2)
    assert harness.choice(urgent).finish is not None
    assert harness.choice(normal).finish is None
    harness.run()


def test_a_low_priority_request_starts_within_its_handicap_under_endless_urgent_load() -> None:
    harness = EngineHarness(max_num_seqs=1, priority_ageing_s=5.0)
    harness.submit([9], max_tokens=1)
    humble = harness.submit([1], max_tokens=1, priority=2)
    started_s = harness.clock()
    while harness.choice(humble).finish is None:
        harness.submit([2], max_tokens=1, priority=0)
        harness.submit([3], max_tokens=1, priority=0)  # twice what one slot can do
        harness.step()
        harness.clock.advance(1.0)
        assert harness.clock() - started_s < 25, "a low priority request starves"
    assert harness.clock() - started_s >= 10, "the handicap of two levels was not observed"


def test_a_long_prompt_at_the_head_is_not_starved_by_short_ones() -> None:
    harness = EngineHarness(num_blocks=8, block_size=4, max_model_len=32, prefix_caching=False)
    harness.submit([1] * 4, max_tokens=20)
    harness.step()
    long = harness.submit([2] * 28, max_tokens=1)
    for i in range(60):
        harness.submit([3 + i % 5] * 2, max_tokens=2)
        harness.step()
        if harness.choice(long).finish is not None:
            break
    assert harness.choice(long).finish is FinishReason.LENGTH


# -------------------------------------------------------------------------------------------------- prefix and fan-out


def test_prefix_hits_are_found_counted_and_told() -> None:
    harness = EngineHarness()
    shared = list(range(1, 13))
    cold = harness.submit([*shared, 40], max_tokens=2)
    harness.run()
    warm = harness.submit([*shared, 50], max_tokens=2)
    harness.run()
    assert harness.choice(cold).num_cached_tokens == 0
    assert harness.choice(warm).num_cached_tokens == 12
    stats = harness.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.num_prompt_tokens) == (26, 12, 26)
    assert harness.executor.plans[-2].num_tokens == [1]
    assert harness.core.reset_prefix_cache() > 0
    again = harness.submit([*shared, 60], max_tokens=1)
    harness.run()
    assert harness.choice(again).num_cached_tokens == 0


def test_a_follow_up_finds_the_first_answer_too() -> None:
    harness = EngineHarness()
    first = harness.submit([1, 2, 3], max_tokens=10)
    harness.run()
    second = harness.submit([1, 2, 3, *harness.choice(first).token_ids, 5], max_tokens=1)
    harness.run()
    assert harness.choice(second).num_cached_tokens == 12


def test_salts_do_not_see_each_other() -> None:
    harness = EngineHarness()
    found = []
    for salt in (None, "a", "b", "a", None):
        request = harness.submit(list(range(1, 10)), max_tokens=1, cache_salt=salt)
        harness.run()
        found.append(harness.choice(request).num_cached_tokens)
    assert found == [0, 0, 0, 8, 8]


def test_new_weights_make_old_blocks_unreachable() -> None:
    harness = EngineHarness()
    prompt = list(range(1, 10))
    harness.submit(prompt, max_tokens=1)
    harness.run()
    harness.core._kv.set_weights_epoch(1)
    harness.executor.epoch = 1  # its check fails the test if KV of the old weights is used
    request = harness.submit(prompt, max_tokens=3)
    harness.run()
    assert harness.choice(request).num_cached_tokens == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_children_share_the_prompt_and_report_what_it_found(prefix_caching: bool) -> None:
    harness = EngineHarness(prefix_caching=prefix_caching)
    prompt = list(range(1, 18))
    for round_number in range(2):
        request = harness.submit(prompt, n=4, max_tokens=3, seed=100)
        harness.step()
        assert running(harness) == [(request, 0)]
        assert harness.core.stats().num_waiting == 3
        harness.step()
        followers = harness.executor.plans[-1].new
        assert [new.num_computed_tokens for new in followers] == [16, 16, 16]
        assert [new.seed for new in followers] == [101, 102, 103]
        assert len({tuple(new.block_ids[:4]) for new in followers}) == 1
        harness.run()
        found = {harness.choice(request, choice).num_cached_tokens for choice in range(4)}
        assert found == {16 if prefix_caching and round_number else 0}
    stats = harness.core.stats()
    assert stats.num_prompt_tokens == 2 * 17
    assert (stats.prefix_queries, stats.prefix_hits) == ((34, 16) if prefix_caching else (0, 0))
    harness.assert_idle()


def test_several_prompts_each_with_its_choices() -> None:
    harness = EngineHarness()
    request = harness.submit([1, 2, 3], [4, 5], n=2, seed=5)
    harness.run()
    for choice in range(4):
        prompt = [[1, 2, 3], [4, 5]][choice // 2]
        assert harness.choice(request, choice).token_ids == expected_output(prompt, 4, frozenset(), 64)
    seeds = sorted(new.seed for plan in harness.executor.plans for new in plan.new)
    assert seeds == [5, 5, 6, 6]


def test_when_the_leader_is_aborted_the_next_child_takes_over() -> None:
    harness = EngineHarness(max_num_batched_tokens=4)
    request = harness.submit(list(range(1, 13)), n=3, max_tokens=2, prompt_logprobs=0)
    harness.step()
    assert harness.abort(request, choice=0) == 1
    harness.run()
    assert harness.choice(request, 0).finish is FinishReason.ABORT
    for choice in (1, 2):
        assert harness.choice(request, choice).finish is FinishReason.LENGTH
        assert harness.choice(request, choice).scored_ids == list(range(2, 13))
    harness.assert_idle()


def test_prompt_logprobs_are_complete_after_a_hit_would_have_been_possible() -> None:
    harness = EngineHarness()
    prompt = list(range(1, 14))
    harness.submit(prompt, max_tokens=1)
    harness.run()
    request = harness.submit(prompt, n=2, max_tokens=1, prompt_logprobs=0)
    harness.run()
    for choice in range(2):
        assert harness.choice(request, choice).scored_ids == prompt[1:]
        assert harness.choice(request, choice).num_cached_tokens == 0
