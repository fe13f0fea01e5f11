"""A Hypothesis state machine moves experts, changes weights and sleeps at random beside requests, on two ranks and, but
for the moving, on one. Both give the same answers bit for bit, and each rank holds the experts that its map gives it.

Slow work runs where it is asked for, in no thread: what fails fails again when it is replayed, and both engines take
the same steps between the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.config.options import ExpertsConfig
from headrace.kernels import has_native
from headrace.testing.control_harness import SlowWork
from headrace.testing.ranks import RankRig, random_map
from headrace.testing.refresh_rig import raw_source
from headrace.testing.tiny import write_tiny_model
from headrace.weights.safetensors import read_folder

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")
SEEDS = (1, 2)
REFUSALS = {"stale_run", "wrong_state", "rebalance_open", "operation_running", "refresh_open", "no_weights"}
seeds, maps = st.sampled_from(SEEDS), st.integers(0, 30)
stagings = st.sampled_from(["always", "never"])


class RankMachine(RuleBasedStateMachine):
    """Rules on `one` and `two`, which live as long as the test does."""

    one: ClassVar[RankRig]
    two: ClassVar[RankRig]
    folders: ClassVar[dict[int, Path]]
    scratch: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        SlowWork.is_slow = SlowWork.is_done_when_left = False
        self.requests: list[int] = []
        self.is_begun = False

    @initialize()
    def begin(self) -> None:
        """Whatever an example that has failed may have left, both engines are as they were at first."""
        self.two.start("cancel")
        self.move(action="abort")
        for rig in (self.two, self.one):
            rig.start("abort_refresh")
            rig.abort()
        self.both("wake")
        self.both("refresh_weights", source=self.path_of(1))
        self.move(action="reset")
        self.settle()
        self.is_begun = True

    def settle(self) -> None:
        while self.two.plane.is_busy or self.two.core.has_work or self.one.core.has_work:
            self.turn(1)

    # ---------------------------------------------------------------------------------------------------------- both

    @staticmethod
    def ask(rig: RankRig, operation: str, **arguments: Any) -> str | None:
        """The code of the refusal, or None. It is answered at once."""
        done = rig.answers[rig.start(operation, **arguments)]
        return None if done.error is None else done.error.code

    def both(self, operation: str, **arguments: Any) -> None:
        assert self.ask(self.two, operation, **arguments) == self.ask(self.one, operation, **arguments)

    def path_of(self, seed: int) -> dict[str, Any]:
        return {"kind": "path", "path": str(self.folders[seed])}

    @property
    def is_free(self) -> bool:
        """No operation runs, so that both engines can be asked the same."""
        return self.is_begun and not self.two.plane.is_busy

    @rule(start=st.integers(0, 60), length=st.integers(1, 40), max_tokens=st.integers(1, 12))
    def submit(self, start: int, length: int, max_tokens: int) -> None:
        prompt = [start + 7 * i % 90 for i in range(length)]
        ours, theirs = (rig.begin(prompt, max_tokens) for rig in (self.two, self.one))
        assert ours == theirs
        self.requests.append(ours)

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.two.turn()
            self.one.turn()

    @precondition(lambda self: self.is_free)
    @rule(seed=seeds, staged=stagings)
    def refresh(self, seed: int, staged: str) -> None:
        self.both("refresh_weights", source=self.path_of(seed), staged=staged, mode="keep")

    @precondition(lambda self: self.is_free)
    @rule(seed=seeds, expert=st.integers(0, 5))
    def change_one_expert(self, seed: int, expert: int) -> None:
        tensors = read_folder(self.folders[seed])
        some = {name: tensor for name, tensor in tensors.items() if f"layers.0.mlp.experts.{expert}." in name}
        for rig in (self.two, self.one):
            source = raw_source(some, self.scratch)  # the engine deletes it
            rig.start("refresh_weights", source=source, delta=True)
        assert self.two.state.has_weights == self.one.state.has_weights

    @precondition(lambda self: self.is_free)
    @rule(staged=stagings)
    def begin_refresh(self, staged: str) -> None:
        self.both("begin_refresh", staged=staged)

    @precondition(lambda self: self.is_free and self.two.state.refresh is not None)
    @rule(seed=seeds, commits=st.booleans())
    def end_refresh(self, seed: int, commits: bool) -> None:
        self.both("apply_refresh", source=self.path_of(seed))
        self.both("commit_refresh" if commits else "abort_refresh")

    @precondition(lambda self: self.is_free)
    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"]]), mode=st.sampled_from(["keep", "abort"]))
    def sleep(self, tags: list[str] | None, mode: str) -> None:
        self.both("sleep", tags=tags, mode=mode)

    @precondition(lambda self: self.is_free)
    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"]]))
    def wake(self, tags: list[str] | None) -> None:
        self.both("wake", tags=tags)

    # -------------------------------------------------------------------------------------------------------- moving

    def move(self, **arguments: Any) -> None:
        call = self.two.start("rebalance_experts", **arguments)
        done = self.two.answers.get(call)
        assert done is None or done.error is None or done.error.code in REFUSALS

    @rule(number=maps, action=st.sampled_from(["apply", "apply", "stage"]), timeout_s=st.sampled_from([None, 5.0]))
    def rebalance(self, number: int, action: str, timeout_s: float | None) -> None:
        target = random_map(self.two.balancer.current, np.random.default_rng(number))
        self.move(action=action, slots=target.slots_LP.tolist(), timeout_s=timeout_s)

    @rule(action=st.sampled_from(["commit", "commit", "abort", "reset"]))
    def end_rebalance(self, action: str) -> None:
        self.move(action=action)

    @precondition(lambda self: self.two.plane.is_busy)
    @rule()
    def cancel(self) -> None:
        self.two.start("cancel")

    @rule()
    def let_time_pass(self) -> None:
        for rig in (self.two, self.one):
            rig.clock.advance(6.0)

    # -------------------------------------------------------------------------------------------------------- checks

    @invariant()
    def ranks_hold_what_the_map_says(self) -> None:
        self.two.core.check_invariants()
        if self.two.state.has_weights:
            self.two.check_experts()

    def teardown(self) -> None:
        if not self.is_begun:
            return
        while self.two.plane.is_busy:
            self.turn(1)
        if self.two.balancer.run is not None and self.two.balancer.run.state == "staged":
            self.move(action="abort")
        if self.two.state.refresh is not None:
            self.both("abort_refresh")
        self.both("wake")
        self.both("refresh_weights", source=self.path_of(1))
        self.settle()
        for request in self.requests:
            ours, theirs = (rig.choice(request) for rig in (self.two, self.one))
            assert (ours.finish, ours.error_code) == (theirs.finish, theirs.error_code)
            assert ours.token_ids == theirs.token_ids
            assert [(each.logprobs, each.prompt_logprobs) for each in ours.details] == [
                (each.logprobs, each.prompt_logprobs) for each in theirs.details
            ]


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RankMachine]]:
    root = tmp_path_factory.mktemp("machine")
    monkeypatch.setattr("headrace.engine.control.state.Background", SlowWork)
    RankMachine.folders = {
        seed: write_tiny_model(
            root / f"{seed}", architecture="qwen3_moe", seed=seed, num_layers=2, num_experts=6, expert_size=40
        )
        for seed in SEEDS
    }
    RankMachine.scratch = root
    RankMachine.one = RankRig(RankMachine.folders[1], 1)
    RankMachine.two = RankRig(
        RankMachine.folders[1], 2, num_redundant=2, experts=ExpertsConfig(expert_move_bytes="12KiB")
    )
    RankMachine.two.copy_at_once()
    yield RankMachine
    RankMachine.one.close()
    RankMachine.two.close()


def test_ranks_and_maps_do_not_show(machine: type[RankMachine]) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    few = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=few)
