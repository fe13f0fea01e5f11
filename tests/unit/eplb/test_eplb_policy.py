"""When experts are moved, and the reason and numbers that each round gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.eplb.layout import ExpertMap, initial_map
from headrace.eplb.placement import Cluster, Strategy
from headrace.eplb.policy import (
    Action,
    Costs,
    Decision,
    Mode,
    MovingLoad,
    Policy,
    Proposal,
    Reason,
    Settings,
)
from headrace.eplb.simulate import ZipfLoads
from headrace.eplb.stats import WindowLoad, balance, rank_loads
from headrace.errors import ConfigError

CLUSTER = Cluster(num_ranks=2)
INITIAL = initial_map(2, 4, 0, 2)
# Layer 0: ranks carry 90 and 10 of the initial map, 60 and 40 at best. Layer 1 is even.
UNEVEN = np.array([[60, 30, 6, 4], [25, 25, 25, 25]], dtype=np.int64)
SETTINGS = Settings(min_tokens=50, balance_threshold=0.9)
COSTS = Costs(bytes_per_expert=1000, bandwidth=1000.0, layer_s=0.5)


def window(tokens_LE: Any = UNEVEN, duration_s: float = 10.0) -> WindowLoad:
    return WindowLoad(np.asarray(tokens_LE, dtype=np.int64), 100, 0.0, duration_s)


def policy(costs: Costs = COSTS, **changes: Any) -> Policy:
    return Policy(replace(SETTINGS, **changes), CLUSTER, costs)


def decide(tokens_LE: Any = UNEVEN, costs: Costs = COSTS, **changes: Any) -> Proposal:
    return policy(costs, **changes).decide(window(tokens_LE), INITIAL, 7.0)


def test_a_gain_is_applied_with_its_numbers() -> None:
    proposal = decide()
    decision, target = proposal.decision, proposal.target
    assert target is not None
    assert (decision.action, decision.reason, decision.time, decision.round) == (Action.APPLY, Reason.GAIN, 7.0, 1)
    assert decision.balance_now is not None
    assert decision.balance_now.per_layer == pytest.approx([50 / 90, 1.0])
    assert decision.balance_predicted is not None
    assert decision.balance_predicted.per_layer == pytest.approx([50 / 64, 1.0])
    # Experts 1 and 3 change places: one to each rank, so one transfer's time and one layer's switch.
    assert rank_loads(UNEVEN, target).tolist() == [[64, 36], [50, 50]]
    assert decision.moved_per_layer == [2, 0]
    assert decision.bytes_to_move == 2000
    assert decision.cost_s == pytest.approx(1 + 0.5)
    # The fullest ranks carry 90 + 50 now, 64 + 50 then; half of the time is spent in experts, over 600 s.
    assert decision.gain_s == pytest.approx(26 / 140 * 0.5 * 600)
    assert (decision.value, decision.limit) == (decision.gain_s, pytest.approx(2 * 1.5))
    assert [move.layer for move in proposal.moves] == [0, 0]


def test_seconds_per_token_count_what_the_engine_really_does() -> None:
    decision = decide(costs=replace(COSTS, token_s=0.01)).decision
    assert decision.gain_s == pytest.approx(26 / 10 * 0.01 * 600)  # 26 tokens less in a window of 10 s
    idle = policy(replace(COSTS, token_s=0.01)).decide(window(duration_s=10_000.0), INITIAL, 0.0).decision
    assert (idle.action, idle.reason) == (Action.SKIP, Reason.TOO_COSTLY)


@pytest.mark.parametrize(
    ("changes", "reason", "value", "limit"),
    [
        ({"mode": Mode.OFF}, Reason.OFF, 0, 0),
        ({"mode": Mode.MANUAL}, Reason.MANUAL, 0, 0),
        ({"min_tokens": 101}, Reason.TOO_FEW_TOKENS, 100, 101),
        ({"balance_threshold": 0.7}, Reason.BALANCED, (50 / 90 + 1) / 2, 0.7),
        ({"min_gain": 0.3}, Reason.SMALL_GAIN, 26 / 140, 0.3),
        ({"min_layer_gain": 0.3}, Reason.SMALL_GAIN, 0, 0.03),  # layer 0 would gain 26 / 90
        ({"horizon_s": 30.0}, Reason.TOO_COSTLY, 26 / 140 * 15, 3),
        ({"margin": 100.0}, Reason.TOO_COSTLY, 26 / 140 * 300, 150),
    ],
)
def test_reasons_to_skip(changes: dict[str, Any], reason: Reason, value: float, limit: float) -> None:
    proposal = decide(**changes)
    decision = proposal.decision
    assert (decision.action, decision.reason) == (Action.SKIP, reason)
    assert (decision.value, decision.limit) == pytest.approx((value, limit))
    assert (proposal.target, proposal.moves) == (None, ())
    assert decision.balance_now is not None


def test_layers_that_gain_little_keep_their_map() -> None:
    random = np.random.default_rng(0)
    tokens_LE = (random.pareto(1.0, (6, 16)) * 1000).astype(np.int64)
    current = initial_map(6, 16, 4, 4)
    deciding = Policy(Settings(min_tokens=0, min_layer_gain=0.3), Cluster(num_ranks=4), COSTS)
    target = deciding.decide(window(tokens_LE), current, 0.0).target
    assert target is not None
    gain_L = 1 - rank_loads(tokens_LE, target).max(axis=1) / rank_loads(tokens_LE, current).max(axis=1)
    changed_L = (target.slots_LP != current.slots_LP).any(axis=1)
    assert 0 < changed_L.sum() < 6
    assert (gain_L[changed_L] >= 0.3).all()


def test_after_a_move_there_is_peace_for_some_rounds_and_some_time() -> None:
    deciding = policy(min_rounds_between_moves=2, cool_down_s=60.0)
    assert deciding.decide(window(), INITIAL, 100.0).target is not None
    assert deciding.decide(window(), INITIAL, 101.0).target is not None, "nobody has moved anything yet"
    deciding.record_move(110.0)
    deciding.propose(window(), INITIAL, 110.5)  # a dry run is no round
    decisions = [deciding.decide(window(), INITIAL, time).decision for time in (111.0, 500.0)]
    assert [(one.reason, one.value, one.limit) for one in decisions] == [
        (Reason.SETTLING, 0, 2),
        (Reason.SETTLING, 1, 2),
    ]
    decision = deciding.decide(window(), INITIAL, 160.0).decision
    assert (decision.reason, decision.value, decision.limit) == (Reason.COOLING_DOWN, 50.0, 60.0)
    assert deciding.decide(window(), INITIAL, 170.0).decision.action is Action.APPLY


def test_a_map_that_was_applied_is_not_moved_again_for_the_same_load() -> None:
    deciding = policy(min_rounds_between_moves=0, cool_down_s=0.0)
    target = deciding.decide(window(), INITIAL, 0.0).target
    assert target is not None
    deciding.record_move(1.0)
    decision = deciding.decide(window(), target, 2.0).decision
    assert (decision.action, decision.reason) == (Action.SKIP, Reason.SMALL_GAIN)
    assert decision.moved_per_layer == [0, 0]


def test_one_strange_window_does_not_count_alone() -> None:
    """A gain must show both in the moving average and in the last window."""
    deciding = policy(balance_threshold=1.0, smoothing=0.5)
    for _ in range(5):
        deciding.decide(window([[25, 25, 25, 25]] * 2), INITIAL, 0.0)
    decision = deciding.decide(window([[30, 30, 20, 20]] * 2), INITIAL, 0.0).decision
    alone = policy(balance_threshold=1.0).decide(window([[30, 30, 20, 20]] * 2), INITIAL, 0.0).decision
    assert alone.gain_s > decision.gain_s


def test_the_moving_average() -> None:
    average = MovingLoad(0.25)
    assert average.update(np.array([[8, 0], [0, 0]])).tolist() == [[8, 0], [0, 0]]
    # Shares: 0.25 x (0, 1) + 0.75 x (1, 0); the second layer is new.
    assert average.update(np.array([[0, 100], [1, 3]])).tolist() == [[75, 25], [1, 3]]
    assert average.update(np.array([[0, 0], [0, 0]])).tolist() == [[0, 0], [0, 0]]
    assert average.update(np.array([[1, 1], [3, 1]])).tolist() == pytest.approx(np.array([[1.375, 0.625], [1.5, 2.5]]))


def test_who_asks_gets_the_best_map_whatever_the_thresholds() -> None:
    deciding = policy(mode=Mode.MANUAL, min_gain=1.0, margin=1e9, min_tokens=10**9)
    proposal = deciding.propose(window(), INITIAL, 3.0)
    assert proposal.target is not None
    assert balance(rank_loads(UNEVEN, proposal.target)).tolist() == pytest.approx([50 / 64, 1.0])
    assert (proposal.decision.action, proposal.decision.reason) == (Action.APPLY, Reason.REQUESTED)
    assert len(proposal.moves) == 2
    again = deciding.propose(window(), proposal.target, 4.0)
    assert (again.decision.action, again.decision.reason, again.target) == (Action.SKIP, Reason.NOTHING_MOVES, None)
    assert again.decision.round == 2


def test_a_map_that_somebody_brings_is_taken_with_its_numbers_even_if_it_is_worse() -> None:
    worse = ExpertMap(np.array([[0, 1, 2, 3], [3, 1, 2, 0]]), 4, 2)
    proposal = policy(mode=Mode.MANUAL).consider(window(), INITIAL, worse, 3.0)
    assert proposal.target == worse
    assert (proposal.decision.action, proposal.decision.reason) == (Action.APPLY, Reason.REQUESTED)
    assert (proposal.decision.moved_per_layer, proposal.decision.gain_s) == ([0, 2], 0.0)
    assert policy().consider(window(), INITIAL, INITIAL, 3.0).decision.reason is Reason.NOTHING_MOVES


def test_rounds_are_due_once_per_interval_and_first_after_a_quarter() -> None:
    deciding = policy(interval_steps=100)
    assert [step for step in range(400) if deciding.takes_turn(step)] == [25, 125, 225, 325]
    assert not any(policy(interval_steps=100, mode=Mode.MANUAL).takes_turn(step) for step in range(400))
    every = policy(interval_steps=1)
    assert [every.takes_turn(step) for step in (0, 1, 1, 2, 2)] == [False, True, False, True, False]
    late = policy(interval_steps=100)
    assert [step for step in (60, 124, 125, 480, 490, 525) if late.takes_turn(step)] == [60, 125, 480, 525]


def test_a_decision_is_data_and_a_line() -> None:
    decision = decide(costs=replace(COSTS, bytes_per_expert=10**9, bandwidth=1e9)).decision
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
    line = decision.describe()
    assert line.startswith(
        "experts: apply (gain: 55.71, limit 3), balance 0.778 (worst layer 0.556), predicted 0.891; "
    )
    assert "2 slots of 1 layers, 2 GB, gains 55.7 s, costs 1.5 s" in line
    assert decide(mode=Mode.OFF).decision.describe().startswith("experts: skip (off: 0, limit 0), balance 0.778")


def rounds(drift: float, num_windows: int) -> tuple[list[Decision], list[float], list[float]]:
    """(decisions, balance of each window under the map then in force, the same if nothing had ever moved)."""
    loads = ZipfLoads(
        num_steps=num_windows,
        num_layers=4,
        num_experts=64,
        window_steps=1,
        tokens_per_step=20_000,
        top_k=4,
        drift=drift,
    )
    start = current = initial_map(4, 64, 16, 8)
    deciding = Policy(Settings(balance_threshold=0.95, cool_down_s=0.0), Cluster(num_ranks=8), COSTS)
    decisions, balanced, plain = [], [], []
    for time, tokens_LE in enumerate(loads.generate()):
        balanced.append(float(balance(rank_loads(tokens_LE, current)).mean()))
        plain.append(float(balance(rank_loads(tokens_LE, start)).mean()))
        proposal = deciding.decide(window(tokens_LE), current, float(time))
        decisions.append(proposal.decision)
        if proposal.target is not None:
            current = proposal.target
            deciding.record_move(float(time))
    return decisions, balanced, plain


def test_a_steady_load_is_balanced_once() -> None:
    decisions, balanced, _ = rounds(drift=0.0, num_windows=12)
    assert [one.action for one in decisions] == [Action.APPLY] + [Action.SKIP] * 11
    assert {one.reason for one in decisions[3:]} == {Reason.BALANCED}
    assert min(balanced[1:]) > 0.97


def test_a_drifting_load_is_followed() -> None:
    decisions, balanced, plain = rounds(drift=0.05, num_windows=20)
    num_moves = sum(one.action is Action.APPLY for one in decisions)
    assert 2 <= num_moves <= 7  # at most every third round
    assert np.mean(balanced[1:]) > np.mean(plain[1:]) + 0.1


def test_an_idle_engine_moves_nothing() -> None:
    decision = decide(np.zeros((2, 4)), min_tokens=0).decision
    assert (decision.action, decision.reason) == (Action.SKIP, Reason.BALANCED)


@pytest.mark.parametrize("strategy", Strategy)
def test_every_strategy_plans(strategy: Strategy) -> None:
    tokens_LE = np.random.default_rng(1).integers(1, 1000, (3, 16))
    deciding = Policy(Settings(strategy=strategy, min_tokens=0), Cluster(num_ranks=4, num_nodes=2, num_groups=4), COSTS)
    target = deciding.propose(window(tokens_LE), initial_map(3, 16, 4, 4), 0.0).target
    assert isinstance(target, ExpertMap)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"interval_steps": 0}, "interval_steps is 0; it must be at least 1"),
        ({"balance_threshold": 1.5}, "balance_threshold is 1.5; it must be 0 to 1"),
        ({"smoothing": 0.0}, "smoothing is 0; it must be 0.01 to 1"),
        ({"margin": 0.5}, "margin is 0.5; it must be at least 1"),
        ({"horizon_s": float("nan")}, "horizon_s is nan; it must be at least 0"),
        ({"horizon_s": float("inf")}, "horizon_s is inf; it must be at least 0"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Settings(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bytes_per_expert": -1}, "bytes_per_expert is -1; it must be at least 0"),
        ({"bandwidth": 0.0}, "bandwidth is 0; it must be at least 1"),
        ({"expert_share": 2.0}, "expert_share is 2; it must be 0 to 1"),
        ({"token_s": -1.0}, "token_s is -1; it must be at least 0"),
    ],
)
def test_costs_out_of_range(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Costs(**{"bytes_per_expert": 1, **changes})
