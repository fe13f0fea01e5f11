"""New weights over several ranks, as one transaction: whatever comes and however, the ranks then compute what one rank
would with the same weights, and every question about weights has the same answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.options import ModelConfig
from headrace.errors import FailedRequest
from headrace.executor import multiproc
from headrace.kernels import has_native
from headrace.models.stage import WeightStage
from headrace.testing.ranks import RankRig, random_map
from headrace.testing.refresh_rig import raw_source
from headrace.testing.tiny import write_tiny_model
from headrace.weights.safetensors import read_folder
from headrace.weights.tensor import CheckpointTensor

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")
Models = Callable[[int], Path]
EXPERT = "model.layers.0.mlp.experts.3."
EXPERT_NAMES = [f"{EXPERT}{module}_proj.weight" for module in ("gate", "up", "down")]
SPREADS: dict[str, dict[str, Any]] = {
    "whole": {"has_whole_experts": True, "num_redundant": 2},
    "cut": {"has_whole_experts": False},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model per seed: a layer with experts, a dense one, and another with experts; ranks share the one KV head."""
    root = tmp_path_factory.mktemp("models")
    made: dict[int, Path] = {}

    def make(seed: int) -> Path:
        if seed not in made:
            made[seed] = write_tiny_model(
                root / f"{seed}", architecture="qwen3_moe", seed=seed, num_layers=3, mlp_only_layers=[1], num_experts=6,
                expert_size=40, hidden_size=64, num_kv_heads=1,
            )  # fmt: skip
        return made[seed]

    return make


@pytest.fixture(scope="module")
def one(models: Models) -> Iterator[RankRig]:
    """One rank, which goes through the same."""
    rig = RankRig(models(1), 1)
    yield rig
    rig.close()


@pytest.fixture(scope="module", params=SPREADS)
def shared_rig(models: Models, request: pytest.FixtureRequest) -> Iterator[RankRig]:
    rig = RankRig(models(1), 2, **SPREADS[request.param])
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def fresh(models: Models) -> Callable[[int], object]:
    """What an engine gives that was started with the model of a seed."""
    known: dict[int, object] = {}

    def bits(seed: int) -> object:
        if seed not in known:
            rig = RankRig(models(seed), 1)
            known[seed] = rig.bits()
            rig.close()
        return known[seed]

    return bits


@pytest.fixture
def rig(shared_rig: RankRig, models: Models, fresh: Callable[[int], object]) -> RankRig:
    """Several ranks with the model of seed 1, ready, whatever the test before has left."""
    if shared_rig.state.refresh is not None:
        shared_rig.control("abort_refresh")
    shared_rig.control("wake")
    shared_rig.control("refresh_weights", source=path_of(models(1)))
    assert shared_rig.core.lifecycle.state == "ready"
    assert shared_rig.bits() == fresh(1)
    return shared_rig


def path_of(folder: Path) -> dict[str, Any]:
    return {"kind": "path", "path": str(folder)}


def some_of(folder: Path, names: list[str]) -> dict[str, CheckpointTensor]:
    tensors = read_folder(folder)
    return {name: tensors[name] for name in names}


def sparse_source(name: str, file: Path) -> dict[str, Any]:
    indices, numbers = np.array([0, 7, 100, 64 * 40 - 1], np.int32), np.array([0.5, -0.25, 2.0, 1.0], np.float32)
    file.write_bytes(indices.tobytes() + numbers.tobytes())
    return {
        "kind": "file", "file": str(file), "format": "sparse", "names": [name], "dtypes": ["float32"], "shapes": [[4]],
    }  # fmt: skip


@pytest.mark.parametrize("staged", ["always", "never"])
def test_every_source_brings_the_same_weights(
    rig: RankRig, models: Models, fresh: Callable[[int], object], tmp_path: Path, staged: str
) -> None:
    safetensors = {"kind": "file", "file": str(models(2) / "model.safetensors"), "format": "safetensors"}
    for source in (path_of(models(2)), safetensors, raw_source(dict(read_folder(models(2))), tmp_path)):
        rig.control("refresh_weights", source=source, staged=staged)
        assert rig.bits() == fresh(2) != fresh(1), source["kind"]
        rig.control("refresh_weights", source=path_of(models(1)), staged=staged)
        assert rig.bits() == fresh(1)


def test_buckets_in_any_order(rig: RankRig, models: Models, fresh: Callable[[int], object], tmp_path: Path) -> None:
    names = np.random.default_rng(3).permutation(list(read_folder(models(2)))).tolist()
    rig.control("begin_refresh", staged="never")
    for start in range(0, len(names), 9):
        bucket = some_of(models(2), names[start : start + 9])
        result = rig.control("apply_refresh", source=raw_source(bucket, tmp_path))
    assert result["num_missing"] == 0
    rig.control("commit_refresh", version="second")
    assert rig.bits() == fresh(2)


def test_deltas_and_questions_about_weights(rig: RankRig, one: RankRig, models: Models, tmp_path: Path) -> None:
    """A few tensors of another model, one expert of it, and changes in places, each on top of the other."""
    one.control("refresh_weights", source=path_of(models(1)))
    few = ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    deltas: list[Callable[[], dict[str, Any]]] = [
        lambda: raw_source(some_of(models(2), few), tmp_path),
        lambda: raw_source(some_of(models(2), EXPERT_NAMES), tmp_path),
        lambda: sparse_source(EXPERT_NAMES[0], tmp_path / "sparse"),
        lambda: sparse_source("model.layers.2.self_attn.q_proj.weight", tmp_path / "sparse"),
    ]
    answers = [one.bits()]
    for make in deltas:
        for each in (one, rig):
            each.control("refresh_weights", source=make(), delta=True)
        answers.append(one.bits())
        assert rig.bits() == answers[-1]
        assert rig.control("checksum") == one.control("checksum")
    assert len({repr(answer) for answer in answers}) == len(answers), "each has changed something"
    for name in (*few, *EXPERT_NAMES, "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        ours, theirs = (each.control("get_weight", name=name, max_values=100_000) for each in (rig, one))
        assert ours == theirs, name
    for folder in (models(1), models(2)):
        ours, theirs = (each.control("compare", path=str(folder)) for each in (rig, one))
        assert ours == theirs
        assert theirs["mismatches"]


def test_a_bad_tensor_in_the_middle(
    rig: RankRig, models: Models, fresh: Callable[[int], object], tmp_path: Path
) -> None:
    """No rank takes anything of a call that fails, and the refresh goes on as if it had not been made."""
    tensors = dict(read_folder(models(2)))
    names = list(tensors)
    thirds = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
    rig.control("begin_refresh", staged="always")
    rig.control("apply_refresh", source=raw_source(thirds[0], tmp_path))
    values = tensors[names[4]].dequantize().copy()
    values.reshape(-1)[-1] = np.nan
    bad = {
        "NaN": thirds[1] | {names[4]: CheckpointTensor.from_floats(names[4], values)},
        "is unknown": thirds[1] | {"model.layers.7.nothing": tensors[names[0]]},
        "has shape": thirds[1] | {names[4]: CheckpointTensor.from_floats(names[4], values[:-1])},
        "came twice": thirds[1] | {names[0]: tensors[names[0]]},
    }
    for why, bucket in bad.items():
        with pytest.raises(FailedRequest, match=why):
            rig.control("apply_refresh", source=raw_source(bucket, tmp_path))
        assert rig.bits() == fresh(1), "the old weights serve"
    rig.control("apply_refresh", source=raw_source(thirds[1], tmp_path))
    with pytest.raises(FailedRequest, match="tensors have not come"):
        rig.control("commit_refresh")
    rig.control("apply_refresh", source=raw_source(thirds[2], tmp_path))
    rig.control("commit_refresh")
    assert rig.bits() == fresh(2)


def test_an_abort(rig: RankRig, models: Models, fresh: Callable[[int], object], tmp_path: Path) -> None:
    part = some_of(models(2), EXPERT_NAMES)
    rig.control("begin_refresh", staged="always")
    rig.control("apply_refresh", source=raw_source(part, tmp_path))
    rig.control("abort_refresh")
    assert rig.bits() == fresh(1)
    rig.control("begin_refresh", staged="never")
    rig.control("apply_refresh", source=raw_source(part, tmp_path))
    rig.control("abort_refresh")
    assert rig.core.lifecycle.state == "poisoned"
    rig.control("refresh_weights", source=path_of(models(2)))
    assert rig.bits() == fresh(2)


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["weights", "kv_cache"]])
def test_sleep(rig: RankRig, fresh: Callable[[int], object], tags: list[str]) -> None:
    rig.control("sleep", tags=tags)
    rig.control("sleep")  # the rest
    rig.control("wake", tags=tags)
    rig.control("wake")
    assert rig.core.lifecycle.state == "ready"
    assert rig.bits() == fresh(1)


def test_kv_memory_that_is_there_stays(rig: RankRig, fresh: Callable[[int], object]) -> None:
    request = rig.begin()
    rig.step(3)
    rig.real.restore_kv()
    rig.run()
    assert rig.bits_of(request) == fresh(1)


def test_a_refresh_that_was_given_up_does_not_meet_the_next_one(
    rig: RankRig, models: Models, fresh: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the first still works when the second begins."""
    entered, may_go_on, take = threading.Event(), threading.Event(), WeightStage.take

    def slow_take(stage: WeightStage, tensors: Any) -> None:
        entered.set()
        assert may_go_on.wait(20.0)
        take(stage, tensors)

    monkeypatch.setattr(WeightStage, "take", slow_take)
    call = rig.start("refresh_weights", source=path_of(models(3)), staged="always")
    assert entered.wait(20.0)
    rig.start("cancel")
    assert rig.answers[call].error is not None
    assert rig.bits() == fresh(1)
    call = rig.start("refresh_weights", source=path_of(models(2)), staged="always")
    assert rig.bits() == fresh(1), "it waits for the first one's thread"
    may_go_on.set()
    while call not in rig.answers:
        rig.turn()
    assert rig.answers[call].error is None
    assert rig.bits() == fresh(2)


def test_a_sparse_change_of_rounded_weights_is_refused(models: Models, tmp_path: Path) -> None:
    messages = []
    for size in (1, 2):
        rig = RankRig(models(1), size, model=ModelConfig(threads=1, quantization="w8"))
        with pytest.raises(FailedRequest, match="kept in w8: a sparse change would round it all anew") as caught:
            rig.control("refresh_weights", source=sparse_source(EXPERT_NAMES[0], tmp_path / "sparse"), delta=True)
        messages.append(str(caught.value))
        rig.close()
    assert messages[0] == messages[1]


def test_what_one_rank_cannot_take_ends_the_refresh_alone(
    rig: RankRig, models: Models, fresh: Callable[[int], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Somebody writes to the files between two ranks' looks at them."""
    with monkeypatch.context() as patched:
        patched.setattr(multiproc, "fingerprint", lambda path: "another")
        with pytest.raises(FailedRequest, match="the files have changed while they were read"):
            rig.control("refresh_weights", source=path_of(models(2)))
        rig.control("begin_refresh", staged="always")
        with pytest.raises(FailedRequest, match="the files have changed"):
            rig.control("apply_refresh", source=path_of(models(2)))
    for operation, arguments in (
        ("apply_refresh", {"source": raw_source(some_of(models(2), EXPERT_NAMES), tmp_path)}),
        ("commit_refresh", {}),
    ):
        with pytest.raises(FailedRequest) as caught:
            rig.control(operation, **arguments)
        assert caught.value.code == "refresh_broken"
    rig.control("abort_refresh")
    assert rig.bits() == fresh(1)
    rig.control("refresh_weights", source=path_of(models(2)))
    assert rig.bits() == fresh(2)


# ------------------------------------------------------------------------------------------------- and a map of experts


with_whole_experts = pytest.mark.parametrize("shared_rig", ["whole"], indirect=True)


@pytest.fixture
def moved(rig: RankRig) -> RankRig:
    """A rig whose map is not the one that it has started with."""
    target = random_map(rig.balancer.current, np.random.default_rng(5))
    rig.control("rebalance_experts", slots=target.slots_LP.tolist())
    return rig


@with_whole_experts
def test_what_is_refreshed_reaches_every_copy_under_the_map_in_force(
    moved: RankRig, one: RankRig, models: Models, tmp_path: Path
) -> None:
    current = moved.balancer.current
    slots_LP = current.slots_LP.copy()
    slots_LP[0] = [3, 0, 1, 2, 3, 4, 5, 3]  # on both ranks, and twice on one
    moved.control("rebalance_experts", slots=slots_LP.tolist())
    one.control("refresh_weights", source=path_of(models(1)))
    for each in (one, moved):
        each.control("refresh_weights", source=raw_source(some_of(models(2), EXPERT_NAMES), tmp_path), delta=True)
    prompts = [list(range(start, start + 40)) for start in (0, 70, 140)]
    assert [moved.bits(prompt) for prompt in prompts] == [one.bits(prompt) for prompt in prompts]
    moved.control("refresh_weights", source=path_of(models(2)), staged="never")
    one.control("refresh_weights", source=path_of(models(2)))
    assert [moved.bits(prompt) for prompt in prompts] == [one.bits(prompt) for prompt in prompts]
    assert moved.balancer.current.slots_LP.tolist() == slots_LP.tolist()


@with_whole_experts
def test_the_map_survives_sleep(moved: RankRig, fresh: Callable[[int], object]) -> None:
    before = moved.balancer.current
    moved.control("sleep")
    moved.control("wake")
    assert moved.balancer.current == before
    assert moved.bits() == fresh(1)


@with_whole_experts
@pytest.mark.parametrize("state", ["asleep", "poisoned"])
def test_without_weights_the_map_changes_alone_and_the_next_come_to_it(
    moved: RankRig, models: Models, fresh: Callable[[int], object], state: str
) -> None:
    """No rank has an expert that could move: the file or the trainer brings each to where it belongs."""
    first = moved.balancer.first_map
    assert first is not None
    for number, bring in enumerate(["wake", "refresh_weights"] if state == "asleep" else ["refresh_weights"]):
        target = random_map(moved.balancer.current, np.random.default_rng(number))
        if state == "asleep":
            moved.control("sleep", tags=["weights"])
        else:
            moved.control("begin_refresh", staged="never")
            moved.control("abort_refresh")
        assert moved.core.lifecycle.state == state
        for action in ("stage", "commit"):
            with pytest.raises(FailedRequest) as caught:
                moved.control(
                    "rebalance_experts", action=action, slots=None if action == "commit" else first.slots_LP.tolist()
                )
            assert caught.value.code == "no_weights"
        moved.control("rebalance_experts", action="reset")
        assert moved.balancer.current == first
        run = moved.control("rebalance_experts", slots=target.slots_LP.tolist())["run"]
        assert (run["outcome"], run["bytes_moved"], run["layers_changed"]) == ("committed", 0, 2)
        moved.control(bring, **({} if bring == "wake" else {"source": path_of(models(1))}))
        moved.check_experts()
        assert moved.balancer.current == target
        assert moved.bits() == fresh(1)


@with_whole_experts
def test_a_refresh_and_a_rebalance_exclude_one_another(
    moved: RankRig, models: Models, fresh: Callable[[int], object]
) -> None:
    before = moved.balancer.current
    target = random_map(before, np.random.default_rng(6)).slots_LP.tolist()
    moved.control("begin_refresh", staged="always")
    for action in ("apply", "stage", "reset", "commit"):
        with pytest.raises(FailedRequest) as caught:
            moved.control("rebalance_experts", action=action, slots=None if action == "commit" else target)
        assert caught.value.code == "refresh_open"
    moved.control("abort_refresh")
    moved.control("rebalance_experts", action="stage", slots=target, run="staged")
    moved.control("refresh_weights", source=path_of(models(2)))
    assert moved.balancer.run is not None
    assert (moved.balancer.run.outcome, moved.balancer.run.error) == ("aborted", "a refresh has begun")
    with pytest.raises(FailedRequest) as caught:
        moved.control("rebalance_experts", action="commit", run="staged")
    assert caught.value.code == "wrong_state"
    assert moved.balancer.current == before
    assert moved.bits() == fresh(2)
    moved.control("rebalance_experts", action="stage", slots=target, run="again")
    moved.control("sleep", tags=["weights"])
    moved.control("wake")
    assert moved.balancer.run.outcome == "aborted"
    assert moved.balancer.current == before


def test_a_comparison_leaves_an_open_refresh_alone(
    rig: RankRig, models: Models, fresh: Callable[[int], object]
) -> None:
    rig.control("begin_refresh", staged="always")
    rig.control("apply_refresh", source=path_of(models(2)))
    assert rig.control("compare", path=str(models(1)))["match"]
    rig.control("commit_refresh")
    assert rig.bits() == fresh(2)
