"""Where an operation falls between requests that come all the time, and what becomes of one that is broken off."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import FailedRequest
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.testing.control_harness import ControlHarness, SlowWork
from headrace.testing.harness import EngineHarness
from headrace.testing.tiny import write_safetensors, write_tiny_model
from headrace.types import FinishReason
from headrace.weights.safetensors import read_folder
from headrace.weights.tensor import CheckpointTensor


@pytest.fixture
def source(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "new.safetensors"
    write_safetensors(file, [CheckpointTensor.from_floats("w", np.ones(2, np.float32))])
    return {"kind": "file", "file": str(file), "format": "safetensors"}


@pytest.fixture
def slow() -> Iterator[None]:
    """Work beside the steps lasts until a test lets it end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.engine.control.state.Background", SlowWork)
        patch.setattr(SlowWork, "is_slow", True)
        yield
        SlowWork.orphans.clear()


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_takes_no_step(mode: str) -> None:
    """It is answered at once, whatever runs; nobody sleeps around it."""
    harness = EngineHarness()
    for _ in range(8):
        harness.submit([1, 2, 3], max_tokens=30)
    harness.step(2)
    assert harness.start("pause", mode=mode) in harness.answers
    assert len(harness.executor.plans) == 2


def test_a_pause_that_waits_ends_with_the_step_that_it_waited_for() -> None:
    harness = EngineHarness()
    harness.submit([1, 2, 3], max_tokens=5)
    call = harness.start("pause", mode="wait")
    for _ in range(4):
        harness.turn()
        assert call not in harness.answers
    harness.turn()
    assert call in harness.answers


@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("seed", range(5))
def test_every_request_knows_its_weights_when_200_race_with_a_refresh(
    mode: str, seed: int, source: dict[str, Any]
) -> None:
    """What was accepted before the barrier, queued or not, ends there or says where its versions change."""
    harness, rng = ControlHarness(), random.Random(seed)
    barrier = rng.randrange(200)
    for number in range(200):
        if number == barrier:
            harness.control("refresh_weights", source=source, mode=mode, version="new")
        harness.prompts[0, number, 0] = prompt = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 20))]
        assert harness.submit(prompt, max_tokens=rng.randrange(1, 9)) == number
        if rng.random() < 0.2:
            harness.turn()
    harness.run()
    for number in range(200):
        record = harness.choice(number)
        told = [detail.weights_version for detail in record.details if detail.weights_version is not None]
        if number >= barrier:
            assert (record.finish, told) == (FinishReason.LENGTH, ["new"])
        elif mode == "abort":
            assert (record.finish is FinishReason.ABORT, told in ([], ["0"])) in ((True, True), (False, True))
        else:
            assert record.finish is FinishReason.LENGTH
            assert told in (["0"], ["new"], ["0", "new"])


@pytest.mark.parametrize("staged", ["always", "never"])
def test_a_failure_that_nobody_waited_for_is_found_later(staged: str, tmp_path: Path) -> None:
    """Some trainers look at no reply. The operation keeps its error, and the state says what is wrong."""
    harness = EngineHarness()
    harness.control("begin_refresh", staged=staged)
    none = {"kind": "file", "file": str(tmp_path / "none"), "format": "safetensors"}
    with pytest.raises(FailedRequest):
        harness.control("apply_refresh", source=none)
    with pytest.raises(FailedRequest):
        harness.control("commit_refresh")
    harness.control("abort_refresh")
    kept = {it["kind"]: it for it in harness.control("operations")["operations"]}
    assert [kept[kind]["state"] for kind in ("apply_refresh", "commit_refresh")] == ["failed", "failed"]
    assert kept["commit_refresh"]["error"]["message"] == "The refresh has no tensors."
    status = harness.control("status")
    assert (status["state"], status["version"]) == ("ready" if staged == "always" else "poisoned", "0")
    assert staged == "always" or "a refresh was aborted" in status["reason"]


# ---------------------------------------------------------------------------------------------------------- broken off


@pytest.mark.parametrize("operation", ["pause", "commit_refresh", "sleep"])
def test_nobody_waits_for_requests_that_are_frozen(operation: str, source: dict[str, Any]) -> None:
    """A wait for them would last until its deadline, and no other operation could end it."""
    harness = ControlHarness()
    request = harness.submit([1, 2], max_tokens=9)
    harness.prompts[0, request, 0] = [1, 2]
    harness.turn()
    if operation == "commit_refresh":
        harness.control("begin_refresh", staged="never", mode="keep")
        harness.control("apply_refresh", source=source)
    else:
        harness.control("pause", mode="keep")
    with pytest.raises(FailedRequest, match="1 choices are frozen and cannot end"):
        harness.control(operation, mode="wait")
    if operation == "commit_refresh":
        harness.control("commit_refresh", mode="keep")
    harness.control("resume")
    harness.run()
    assert harness.choice(request).finish is FinishReason.LENGTH


def test_a_wait_that_is_cancelled_lets_go_of_what_it_held() -> None:
    harness = EngineHarness()
    harness.submit([1, 2], max_tokens=9)
    harness.start("pause", mode="wait")
    held = harness.submit([3], max_tokens=2)
    harness.start("cancel")
    harness.run()
    assert harness.choice(held).finish is FinishReason.LENGTH


@pytest.mark.usefixtures("slow")
def test_a_sender_is_not_silent_while_its_tensors_are_read(source: dict[str, Any]) -> None:
    """A source may take longer than the silence that ends a refresh."""
    harness = EngineHarness()
    harness.control("begin_refresh", staged="never", silence_s=1.0)
    call = harness.start("apply_refresh", source=source)
    harness.clock.advance(30.0)
    harness.turn()
    SlowWork.is_slow = False
    harness.turn()
    assert harness.answers[call].error is None
    harness.clock.advance(0.9)
    harness.turn()
    harness.control("commit_refresh")
    assert harness.core.lifecycle.state == "ready"


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("staged", ["always", "never"])
@pytest.mark.parametrize("operation", ["apply_refresh", "commit_refresh"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_work_that_is_broken_off_takes_its_refresh_along(
    how: str, operation: str, staged: str, is_done: bool, source: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may go on, or have ended just now; nobody may build on what it leaves."""
    harness = EngineHarness()
    harness.control("begin_refresh", staged=staged)
    arguments: dict[str, Any] = {"source": source} if operation == "apply_refresh" else {}
    if operation == "commit_refresh":
        monkeypatch.setattr(SlowWork, "is_slow", False)
        harness.control("apply_refresh", source=source)
    monkeypatch.setattr(SlowWork, "is_slow", True)
    monkeypatch.setattr(SlowWork, "is_done_when_left", is_done)
    call = harness.start(operation, timeout_s=2.0, **arguments)
    if how == "cancel":
        harness.start("cancel")
    else:
        harness.clock.advance(60.0)
        harness.turn()
    error = harness.answers[call].error
    assert error is not None
    assert error.code == ("cancelled" if how == "cancel" else "deadline_exceeded")
    assert harness.control("status")["refresh"] is None
    assert harness.core.lifecycle.state == ("ready" if staged == "always" else "poisoned")
    assert (harness.core.lifecycle.version, harness.core.lifecycle.epoch) == ("0", 0)


def test_a_commit_that_fails_keeps_the_silence_that_its_begin_allowed() -> None:
    harness = EngineHarness()
    harness.control("begin_refresh", silence_s=2.0)
    with pytest.raises(FailedRequest, match="The refresh has no tensors"):
        harness.control("commit_refresh")
    harness.clock.advance(3.0)
    harness.turn()
    assert harness.control("status")["refresh"] is None


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_delta_that_goes_on_after_a_failed_commit_loses_nothing(tmp_path: Path, backend: str) -> None:
    """The parts of one packed unit come before and after a `finish` that led to no swap."""
    old, new = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    tensors = read_folder(new)
    first, second = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "kq")
    executor = UniprocExecutor(old, create_backend(backend, num_threads=1))
    executor.allocate(num_blocks=8, block_size=16, max_num_seqs=2)
    stage, at_once = (executor.open_stage(is_delta=True) for _ in range(2))
    for name in (first, second):
        stage.add({name: tensors[name]})
        executor.finish(stage)
    at_once.add({first: tensors[first], second: tensors[second]})
    executor.finish(at_once)
    executor.swap(stage)
    found = {name: executor.read_weight(name) for name in executor.weight_names()}
    executor.swap(at_once)
    assert [name for name in found if not np.array_equal(found[name], executor.read_weight(name))] == []
