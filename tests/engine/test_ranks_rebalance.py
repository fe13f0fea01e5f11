"""Experts that move while answers are computed: the bits of every answer are those of one rank that has them all, and
what ends early leaves each layer with weights and map that belong together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.options import ExpertsConfig
from headrace.engine.control import state
from headrace.errors import FailedRequest
from headrace.kernels import has_native
from headrace.testing.control_harness import SlowWork
from headrace.testing.ranks import RankRig, random_map
from headrace.testing.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")
NUM_MAPS = 100  # on each of two rigs
PROMPTS = [[start + 7 * i % 90 for i in range(length)] for start, length in enumerate((3, 40, 17, 9, 60, 25))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with experts and a dense one between them."""
    folder = tmp_path_factory.mktemp("tiny") / "moe"
    return write_tiny_model(
        folder, architecture="qwen3_moe", num_layers=3, mlp_only_layers=[1], num_experts=6, expert_size=40,
        hidden_size=64, num_heads=8, num_kv_heads=4, router_skew=1.5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path) -> list[object]:
    """The answer to each prompt, of one rank that does nothing else."""
    rig = RankRig(model, 1)
    answers: list[object] = [rig.bits(prompt, max_tokens=12) for prompt in PROMPTS]
    rig.close()
    return answers


@pytest.fixture(scope="module")
def quick(model: Path) -> Iterator[RankRig]:
    """A layer has its new map in the next step."""
    rig = RankRig(model, 3, num_redundant=3)
    rig.copy_at_once()
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[RankRig]:
    """Moving takes many steps: an expert has 30 KB here."""
    rig = RankRig(model, 2, num_redundant=2, experts=ExpertsConfig(expert_move_bytes="20KiB"))
    yield rig
    rig.close()


@pytest.fixture
def rig(slow: RankRig) -> RankRig:
    """The slow one, idle."""
    slow.run()
    assert slow.balancer.is_free
    assert not slow.plane.is_busy
    return slow


@pytest.mark.parametrize("name", ["quick", "slow"])
def test_any_map_at_any_step(
    name: str, request: pytest.FixtureRequest, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go all the while, several at a time."""
    monkeypatch.setattr(state, "Background", SlowWork)  # nobody waits for a thread
    rig: RankRig = request.getfixturevalue(name)
    rng = np.random.default_rng(0)
    requests: list[tuple[int, int]] = []
    num_turns = 0
    for number in range(NUM_MAPS):
        target = random_map(rig.balancer.current, rng)
        is_staged = number % 3 == 2
        action = "stage" if is_staged else "apply"
        call = rig.start("rebalance_experts", action=action, slots=target.slots_LP.tolist())
        while True:
            while rig.core.num_live < 4:
                prompt = int(rng.integers(len(PROMPTS)))
                requests.append((prompt, rig.begin(PROMPTS[prompt], max_tokens=12)))
            rig.turn()
            num_turns += 1
            if call in rig.answers:
                break
        assert rig.answers[call].error is None
        if is_staged:
            rig.control("rebalance_experts", action="commit")
        assert rig.balancer.current == target
    rig.run()
    assert rig.balancer.counts.num_rebalances >= NUM_MAPS
    assert (num_turns < 4 * NUM_MAPS) if name == "quick" else (num_turns > 8 * NUM_MAPS), (
        "many maps, or many steps each"
    )
    assert len(requests) > 20
    for prompt, request_id in requests:
        assert rig.bits_of(request_id) == expected[prompt]
    rig.check_experts()


@pytest.mark.parametrize("name", ["quick", "slow"])
def test_the_same_weights_anew_between_maps(
    name: str, request: pytest.FixtureRequest, expected: list[object], model: Path
) -> None:
    """Threads read and pack them beside the steps."""
    rig: RankRig = request.getfixturevalue(name)
    rng = np.random.default_rng(1)
    requests: list[tuple[int, int]] = []
    for number in range(12):
        target = random_map(rig.balancer.current, rng)
        operations: list[tuple[str, dict[str, Any]]] = [
            ("rebalance_experts", {"slots": target.slots_LP.tolist()}),
            (
                "refresh_weights",
                {"source": {"kind": "path", "path": str(model)}, "staged": ("always", "never")[number % 2]},
            ),
        ]
        for operation, arguments in operations:
            call = rig.start(operation, **arguments)
            while call not in rig.answers:
                while rig.core.num_live < 4:
                    prompt = int(rng.integers(len(PROMPTS)))
                    requests.append((prompt, rig.begin(PROMPTS[prompt], max_tokens=12)))
                rig.turn()
            assert rig.answers[call].error is None
    rig.run()
    for prompt, request_id in requests:
        assert rig.bits_of(request_id) == expected[prompt]
    rig.check_experts()


def begin_change(rig: RankRig, action: str) -> tuple[int, np.ndarray, np.ndarray]:
    """A change under way, with requests beside it: its call, the map before and the one that is wanted, in which the
    two ranks have changed places."""
    before = rig.balancer.current.slots_LP
    target = np.roll(before, before.shape[1] // 2, axis=1)
    for prompt in PROMPTS[:3]:
        rig.begin(prompt, max_tokens=12)
    call = rig.start("rebalance_experts", action=action, slots=target.tolist(), run="mine", timeout_s=50.0)
    while rig.balancer.run is None or rig.balancer.run.state == "free":
        rig.turn()  # the plan is made in a thread
    assert call not in rig.answers
    return call, before, target


def finish_change(rig: RankRig, call: int) -> Any:
    while call not in rig.answers:
        rig.turn()
    return rig.answers[call]


@pytest.mark.parametrize("how", ["cancelled", "late"])
@pytest.mark.parametrize("action", ["stage", "apply"])
def test_what_ends_while_it_moves(rig: RankRig, expected: list[object], action: str, how: str) -> None:
    """The map that was in force stays, of each layer that was not reached."""
    num_failures = rig.balancer.counts.num_failures
    call, before, target = begin_change(rig, action)
    while action == "apply" and np.array_equal(rig.balancer.current.slots_LP, before):
        rig.turn()  # until a layer has changed
    rig.turn()
    assert call not in rig.answers, "the other layer is still to come"
    if how == "cancelled":
        rig.start("cancel")
    else:
        rig.clock.advance(51.0)
        rig.turn()
    done = finish_change(rig, call)
    assert done.error is not None
    assert done.error.status == (409 if how == "cancelled" else 504)
    run = rig.balancer.run
    assert run is not None
    assert (run.state, run.outcome) == ("free", "failed")
    assert rig.balancer.counts.num_failures == num_failures + 1
    after = rig.balancer.current.slots_LP
    if action == "apply":
        assert "1 layers have the new map, the others keep the old one" in done.error.message
        np.testing.assert_array_equal(after, [target[0], before[1]])
    else:
        np.testing.assert_array_equal(after, before)
    assert run.layers_changed == (1 if action == "apply" else 0)
    assert not rig.real.expert_moves._shelf._taken  # type: ignore[union-attr]  # what was moved is forgotten
    rig.check_experts()
    assert [rig.bits(prompt, max_tokens=12) for prompt in PROMPTS] == expected


def test_what_is_staged_may_be_given_up(rig: RankRig, expected: list[object]) -> None:
    call, before, _ = begin_change(rig, "stage")
    assert finish_change(rig, call).error is None
    assert rig.balancer.run is not None
    assert rig.balancer.run.state == "staged"
    result = rig.control("rebalance_experts", action="abort", run="mine")
    assert (result["run"]["state"], result["run"]["outcome"]) == ("free", "aborted")
    np.testing.assert_array_equal(rig.balancer.current.slots_LP, before)
    rig.check_experts()
    assert rig.bits(PROMPTS[1], max_tokens=12) == expected[1]


def code_of(rig: RankRig, **arguments: Any) -> str | None:
    with pytest.raises(FailedRequest) as caught:
        rig.control("rebalance_experts", **arguments)
    return caught.value.code


def test_runs_that_are_over_or_were_never_begun(rig: RankRig) -> None:
    rig.control("rebalance_experts", action="reset")
    assert code_of(rig, action="commit", run="nobody's") == "stale_run"
    assert code_of(rig, action="abort", run="nobody's") == "stale_run"
    call, _, target = begin_change(rig, "stage")
    assert code_of(rig, action="commit", run="mine") == "operation_running"
    assert finish_change(rig, call).error is None
    assert code_of(rig, action="commit", run="other") == "stale_run"
    assert code_of(rig, action="stage", slots=target.tolist()) == "rebalance_open"
    assert code_of(rig, action="apply", slots=target.tolist()) == "rebalance_open"
    rig.control("rebalance_experts", action="commit", run="mine")
    np.testing.assert_array_equal(rig.balancer.current.slots_LP, target)
    assert code_of(rig, action="commit", run="mine") == "wrong_state"
    assert code_of(rig, action="abort", run="mine") == "wrong_state"
    rig.check_experts()


def test_maps_that_do_not_fit_change_nothing(rig: RankRig) -> None:
    before = rig.balancer.current
    num_runs = rig.balancer.counts.num_rebalances + rig.balancer.counts.num_failures
    slots = before.slots_LP.tolist()
    for wrong in (slots[:1], [row[:-1] for row in slots], [[0] * 8, slots[1]], [[9, *slots[0][1:]], slots[1]]):
        with pytest.raises(FailedRequest) as caught:
            rig.control("rebalance_experts", slots=wrong)
        assert caught.value.info().status == 400
    assert rig.balancer.current == before
    assert rig.balancer.is_free
    assert rig.balancer.counts.num_rebalances + rig.balancer.counts.num_failures == num_runs


def test_a_plan_says_how_much_would_move(rig: RankRig) -> None:
    target = random_map(rig.balancer.current, np.random.default_rng(9)).slots_LP.tolist()
    planned = rig.control("rebalance_experts", action="plan", slots=target)
    assert planned["slots"] == target
    done = rig.control("rebalance_experts", slots=target)
    assert done["run"]["bytes_moved"] == planned["bytes_to_move"] > 0
    assert done["run"]["layers_changed"] == 2
    again = rig.control("rebalance_experts", slots=target)
    assert (again["run"]["bytes_moved"], again["run"]["layers_changed"]) == (0, 0)
