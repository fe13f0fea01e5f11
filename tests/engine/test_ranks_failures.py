"""What happens when ranks end or come apart: it is noticed, named, and no step follows; and no process is left."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.config.options import ExpertsConfig, ModelConfig, ParallelConfig
from headrace.errors import CheckpointError, ConfigError, Conflict, FailedRequest, HeadraceError, StartupError
from headrace.executor import create_executor, workers
from headrace.executor.workers import Workers
from headrace.kernels import has_native
from headrace.llm import LLM
from headrace.testing.ranks import RankRig, random_map
from headrace.testing.tiny import write_tiny_model
from headrace.transport import worker as wire

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")
MOE: dict[str, Any] = {"architecture": "qwen3_moe", "num_experts": 6, "expert_size": 40}
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "moe", **MOE)


@pytest.fixture
def rig(model: Path) -> Iterator[RankRig]:
    """Of the test alone: it breaks it."""
    rig = RankRig(model, 2, num_redundant=2, experts=ExpertsConfig(expert_move_bytes="4KiB"))
    yield rig
    rig.close()
    assert not worker_processes()


def worker_processes() -> list[psutil.Process]:
    def is_worker(process: psutil.Process) -> bool:
        try:
            return workers.MODULE in process.cmdline()
        except psutil.Error:  # it has just gone
            return False

    return [child for child in psutil.Process().children(recursive=True) if is_worker(child)]


def workers_of(rig: RankRig) -> Workers:
    found: Workers = rig.real._workers  # type: ignore[attr-defined]  # of the executor with several ranks
    return found


def assert_dead(rig: RankRig, why: str) -> None:
    """The engine ends before its next step, and the other ranks have been told."""
    with pytest.raises(workers.WorkerDied, match=why):
        workers_of(rig).check(wait_s=PATIENCE_S)
    _, alive = psutil.wait_procs(worker_processes(), PATIENCE_S)
    assert not alive


def assert_failed(rig: RankRig, call: int) -> None:
    """The operation says which rank it was, and the engine ends."""
    while call not in rig.answers:
        rig.turn()
    error = rig.answers[call].error
    assert error is not None
    assert error.status == 500
    assert "rank 1 (process" in error.message
    assert_dead(rig, "rank 1")


def kill(number: signal.Signals = signal.SIGKILL) -> None:
    for process in worker_processes():
        process.send_signal(number)


# ------------------------------------------------------------------------------------------------------- ranks that end


def test_a_worker_that_is_killed_while_idle(rig: RankRig) -> None:
    rig.bits()
    workers_of(rig).check()
    kill()
    assert_dead(rig, r"rank 1 \(process \d+\) has ended with code -9")


def test_a_worker_that_is_killed_in_a_step(rig: RankRig) -> None:
    rig.begin(max_tokens=40)
    rig.step(3)
    kill(signal.SIGSTOP)
    threading.Timer(0.2, kill).start()  # by then the step waits for it
    with pytest.raises(workers.WorkerDied, match=r"rank 1 \(process \d+\) has ended with code -9"):
        rig.run()
    assert_dead(rig, "rank 1")


@pytest.mark.parametrize("action", ["apply", "stage"])
def test_a_worker_that_is_killed_while_experts_move(rig: RankRig, action: str) -> None:
    target = random_map(rig.balancer.current, np.random.default_rng(0)).slots_LP.tolist()
    call = rig.start("rebalance_experts", action=action, slots=target)
    mover = rig.real.expert_moves
    assert mover is not None
    while not mover.num_bytes:
        rig.turn()
    assert call not in rig.answers, "there is more to move"
    kill()
    assert_failed(rig, call)


def test_a_worker_that_is_killed_while_a_map_is_staged(rig: RankRig) -> None:
    target = random_map(rig.balancer.current, np.random.default_rng(0)).slots_LP.tolist()
    rig.control("rebalance_experts", action="stage", slots=target)
    kill()
    assert_failed(rig, rig.start("rebalance_experts", action="commit"))


def test_a_worker_that_is_killed_in_a_refresh(rig: RankRig, model: Path) -> None:
    rig.control("begin_refresh", staged="always")
    kill(signal.SIGSTOP)
    call = rig.start("apply_refresh", source={"kind": "path", "path": str(model)})
    rig.turn()
    assert call not in rig.answers, "it waits for the worker"
    kill()
    assert_failed(rig, call)


def test_a_step_that_fails_on_one_rank(rig: RankRig) -> None:
    group = workers_of(rig)._group
    group.mailbox(group.posted + 1, 32)[:] = 255  # minus one tokens
    group.post()
    assert_dead(rig, r"rank 1 \(process \d+\) has ended with code 1")


# ----------------------------------------------------------------------------------------------- ranks that come apart


def test_what_only_some_ranks_have_done_ends_the_engine(rig: RankRig, model: Path) -> None:
    def fail(stage: object) -> None:
        raise MemoryError("no room here")

    rig.real._own.swap = fail  # type: ignore[attr-defined]  # rank 0's part alone
    with pytest.raises(FailedRequest, match="SwapStage did not succeed on every rank: MemoryError: no room here"):
        rig.control("refresh_weights", source={"kind": "path", "path": str(model)}, staged="always")
    assert_dead(rig, "SwapStage did not succeed on every rank")


def test_what_only_a_worker_could_not_do_ends_the_engine(rig: RankRig) -> None:
    with pytest.raises(
        workers.WorkerDied, match="SwapStage did not succeed on every rank: InternalError: rank 1: KeyE"
    ):
        workers_of(rig).call(wire.SwapStage(99), "between")
    assert_dead(rig, "SwapStage did not succeed")
    rig.begin()
    with pytest.raises(workers.WorkerDied, match="SwapStage"):
        rig.run()


def test_a_question_may_fail_and_no_more(rig: RankRig) -> None:
    with pytest.raises(Conflict, match="The refresh has ended"):
        workers_of(rig).call(wire.DifferingFrom(99), "beside", may_fail=True)
    workers_of(rig).check()
    before = rig.bits()
    with pytest.raises(FailedRequest, match="There is no tensor 'nonsense'"):
        rig.control("get_weight", name="nonsense")
    assert rig.bits() == before


def test_experts_for_which_one_rank_has_no_room(rig: RankRig) -> None:
    """E1. What serves has not changed, so nothing ends but the run."""
    before, bits, backend = rig.balancer.current, rig.bits(), rig.real._own._backend  # type: ignore[attr-defined]

    def blank(kind: str, rows: int, cols: int) -> None:
        raise MemoryError("no room here")

    target = random_map(before, np.random.default_rng(0))
    backend.blank = blank
    with pytest.raises(FailedRequest, match="no room here"):
        rig.control("rebalance_experts", slots=target.slots_LP.tolist())
    assert rig.balancer.run is not None
    assert (rig.balancer.run.state, rig.balancer.run.outcome) == ("free", "failed")
    del backend.blank
    workers_of(rig).check()
    assert rig.balancer.current == before
    assert rig.bits() == bits
    rig.control("rebalance_experts", slots=target.slots_LP.tolist())
    rig.check_experts()
    assert rig.bits() == bits


def test_what_is_given_up_is_given_back(rig: RankRig, model: Path) -> None:
    """A stage that was aborted, or only compared with, is gone on every rank."""
    rig.control("begin_refresh", staged="always")
    rig.control("apply_refresh", source={"kind": "path", "path": str(model)})
    rig.control("abort_refresh")
    for number in range(4):
        with pytest.raises(Conflict, match="The refresh has ended"):
            workers_of(rig).call(wire.FinishStage(number), "beside", may_fail=True)
    assert rig.control("compare", path=str(model))["match"]
    for number in range(4):
        with pytest.raises(Conflict, match="The refresh has ended"):
            workers_of(rig).call(wire.FinishStage(number), "beside", may_fail=True)


def test_a_worker_that_hangs_is_ended_by_force(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_STOP_WAIT_S", 0.1)
    rig = RankRig(model, 2)
    kill(signal.SIGSTOP)
    rig.close()
    rig.close()
    assert not worker_processes()


# ------------------------------------------------------------------------------------------------------------- starting


def start(
    folder: Path, size: int, *, redundant: int = 0, is_spread: bool = False, expert_map: str | None = None
) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=size, enable_expert_parallel=is_spread, redundant_experts=redundant, expert_map=expert_map
    )
    create_executor(ModelConfig(threads=1), folder, parallel=parallel).close()


def damage_nothing(folder: Path) -> None:
    """Another thing is wrong."""


def cut_the_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "options", "error", "why"),
    [
        (cut_the_file, {"size": 2}, CheckpointError, "model.safetensors"),
        (damage_nothing, {"size": 3}, ConfigError, "--tensor-parallel-size 3 is not possible"),
        (
            damage_nothing,
            {"size": 2, "redundant": 1, "is_spread": True},
            ConfigError,
            "redundant.* is 1.*allowed: 0, 2",
        ),
        (damage_nothing, {"size": 2, "redundant": 2}, ConfigError, "2 needs --enable-expert-parallel"),
        (damage_nothing, {"size": 2, "expert_map": "x.json"}, ConfigError, "x.json needs --enable-expert-parallel"),
        (
            damage_nothing,
            {"size": 2, "is_spread": True, "expert_map": "nowhere.json"},
            ConfigError,
            "cannot read --expert-map nowhere.json: No such file",
        ),
    ],
)
def test_what_cannot_start(
    tmp_path: Path,
    damage: Callable[[Path], None],
    options: dict[str, Any],
    error: type[HeadraceError],
    why: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = write_tiny_model(tmp_path / "moe", **MOE)
    damage(folder)
    with pytest.raises(error, match=why) as caught:
        start(folder, **options)
    assert "\n" not in str(caught.value)
    assert not worker_processes()
    assert capfd.readouterr().err == "", "the error says it all"


def test_a_worker_that_does_not_even_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match=r"rank 1 \(process \d+\) has ended with code 1 before it was ready"):
        start(model, 2)


def test_the_offline_class_leaves_no_process(model: Path) -> None:
    llm = LLM(str(model), tensor_parallel_size=2, enable_expert_parallel=True)
    try:
        assert len(worker_processes()) == 1
        llm.generate(["abc"])
    finally:
        llm.close()
    assert not worker_processes()
    with pytest.raises(StartupError):
        LLM(str(model), tensor_parallel_size=2, block_size=7)
    assert not worker_processes()
