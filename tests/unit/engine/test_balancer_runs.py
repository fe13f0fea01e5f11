"""A run of the expert balancer that somebody else leads: begun, staged, given up when nobody speaks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from headrace.config.options import ExpertsConfig
from headrace.engine.balancer import ExpertBalancer, RunState
from headrace.eplb import ExpertMap, initial_map
from headrace.errors import Conflict
from headrace.executor.base import Executor
from headrace.testing.clock import FakeClock


class FakeMover:
    bytes_per_expert = 8
    num_drops = 0

    def drop(self) -> None:
        self.num_drops += 1


@dataclass
class FakeExecutor:
    """Two layers with four experts each, over two ranks."""

    expert_map: ExpertMap = field(default_factory=lambda: initial_map(2, 4, 0, 2))
    expert_layers: tuple[int, ...] = (0, 1)
    expert_moves: FakeMover = field(default_factory=FakeMover)

    def take_expert_counts(self) -> Any:
        return np.zeros((2, 4), np.int64)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def balancer(clock: FakeClock) -> ExpertBalancer:
    return ExpertBalancer(cast(Executor, FakeExecutor()), ExpertsConfig(), lambda: None, clock)


def test_a_run_goes_on_under_the_id_that_it_was_begun_with(balancer: ExpertBalancer) -> None:
    begun = balancer.open_run("a", RunState.OPEN)
    assert not balancer.is_free
    assert balancer.open_run("a", RunState.OPEN) is begun
    for other in ("b", None):
        with pytest.raises(Conflict) as caught:
            balancer.open_run(other)
        assert caught.value.code == "rebalance_open"
    assert balancer.open_run("a") is begun
    assert begun.state is RunState.MOVING
    with pytest.raises(Conflict):
        balancer.open_run("a", RunState.OPEN)
    balancer.end(begun, "aborted")
    assert balancer.open_run("a") is not begun


@pytest.mark.parametrize("state", [RunState.OPEN, RunState.STAGED])
def test_silence_ends_it(balancer: ExpertBalancer, clock: FakeClock, state: RunState) -> None:
    run = balancer.open_run("a", state)
    run.silence_s = 10.0
    for _ in range(5):
        clock.advance(9.0)
        balancer.hear("a")
        balancer.expire()
        assert run.state is state
    balancer.hear("b")
    clock.advance(10.1)
    balancer.hear("b")
    balancer.expire()
    assert (run.state, run.outcome) == (RunState.FREE, "aborted")
    assert "nothing was heard of it for 10 s" in str(run.error)
    assert balancer.counts.num_failures == 0


def test_what_moves_or_has_no_limit_is_left_alone(balancer: ExpertBalancer, clock: FakeClock) -> None:
    run = balancer.open_run("a", RunState.STAGED)
    clock.advance(1e6)
    balancer.expire()
    assert run.state is RunState.STAGED
    run.silence_s, run.state = 1.0, RunState.MOVING
    balancer.expire()
    assert run.state is RunState.MOVING


def test_counts_are_taken_every_few_steps_and_before_they_are_read(clock: FakeClock) -> None:
    class Busy(FakeExecutor):
        def take_expert_counts(self) -> Any:
            return np.ones((2, 4), np.int64)

    balancer = ExpertBalancer(cast(Executor, Busy()), ExpertsConfig(), lambda: None, clock)
    for step in range(1, 8):
        balancer.observe(step)
    assert balancer.window.read().num_steps == 0
    balancer.observe(8)
    load = balancer.window.read()
    assert (load.num_steps, load.num_tokens) == (8, 4)
    balancer.observe(10)
    assert balancer.report()["window"]["steps"] == 10
    assert balancer.tokens_by_rank().sum() == 2 * 8, "nothing has come since"

    short = ExpertBalancer(cast(Executor, Busy()), ExpertsConfig(expert_window_steps=20), lambda: None, clock)
    short.observe(2)
    assert short.window.read().num_steps == 2, "a window has ten parts at least"
