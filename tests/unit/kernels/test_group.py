"""The memory that the ranks of a model share: the barrier, the mailbox, and how a failure ends every wait.

Ranks are threads here, over memory that they map as processes would, and in one test a process.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native import _native
from headrace.kernels.native.mailbox import post_inputs, read_inputs
from headrace.kernels.ops import StepInputs

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has memfd_create")
SIZE = 3
PATIENCE_S = 20.0


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("group")
    os.truncate(descriptor, _native.Group.num_bytes)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(params=["own cores", "shared cores"])
def groups(request: pytest.FixtureRequest, memory: int) -> Iterator[list[Any]]:
    """One per rank. Ranks that share cores do not spin."""
    cores = os.sched_getaffinity(0)
    if request.param == "shared cores":
        os.sched_setaffinity(0, {min(cores)})
    try:
        yield [_native.Group(memory, rank, SIZE) for rank in range(SIZE)]
    finally:
        os.sched_setaffinity(0, cores)


def on_ranks(groups: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """What each rank's work returns; it has to end."""
    results: list[Any] = [None] * len(groups)

    def run(index: int) -> None:
        results[index] = work(groups[index])

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank waits for ever"
    return results


def test_nobody_passes_a_barrier_before_all_have_come(groups: list[Any]) -> None:
    rounds = np.zeros(SIZE, np.int64)

    def work(group: Any) -> bool:
        for count in range(1, 201):
            rounds[group.rank] = count
            if not group.barrier() or rounds.tolist() != [count] * SIZE or not group.barrier():
                group.fail()
                return False
        return True

    assert on_ranks(groups, work) == [True] * SIZE


def test_what_is_posted_arrives_in_order(groups: list[Any]) -> None:
    def work(group: Any) -> list[int]:
        seen = []
        for number in range(1, 101):
            if group.rank == 0:
                group.mailbox(number, 8)[:] = number
                group.post()
            elif group.wait(number - 1, PATIENCE_S) != number:
                return []
            seen.append(int(group.mailbox(number, 8)[0]))
            group.barrier()
        return seen

    assert on_ranks(groups, work) == [list(range(1, 101))] * SIZE
    assert [group.posted for group in groups] == [100] * SIZE


def test_a_wait_has_an_end(groups: list[Any]) -> None:
    started_s = time.monotonic()
    assert groups[1].wait(0, 0.05) == 0
    assert 0.05 <= time.monotonic() - started_s < 5
    groups[0].post()
    assert groups[1].wait(0, 0.0) == 1, "what is there already is seen without waiting"


@pytest.mark.parametrize("wait", [lambda group: group.barrier(), lambda group: group.wait(0, 1e6)])
def test_a_failure_ends_every_wait(groups: list[Any], wait: Callable[[Any], Any]) -> None:
    entered = threading.Semaphore(0)

    def work(group: Any) -> Any:
        if group.rank == 0:
            for _ in range(SIZE - 1):
                entered.acquire()
            group.fail()
            return 0
        entered.release()
        return wait(group)

    assert on_ranks(groups, work) == [0] * SIZE, "False of a barrier, the number seen of a wait"
    assert all(group.has_failed for group in groups)
    assert not any(group.barrier() for group in groups), "and every later one"
    groups[0].post()
    assert groups[1].wait(0, 1e6) == 0, "nothing is posted any more"


def test_what_does_not_fit(groups: list[Any]) -> None:
    group = groups[0]
    with pytest.raises(MemoryError):
        group.mailbox(1, (1 << 30) + 1)
    with pytest.raises(MemoryError):
        group.logits(1 << 20, 1 << 20)


def test_a_step_crosses_as_it_is(groups: list[Any]) -> None:
    rng = np.random.default_rng(3)
    for number, (tokens, sequences, blocks, rows) in enumerate([(5, 2, 3, 2), (1, 1, 1, 0), (300, 7, 40, 9)], 1):
        inputs = StepInputs(
            rng.integers(0, 99, tokens, np.int32),
            np.arange(tokens, dtype=np.int32),
            rng.integers(0, 1 << 40, tokens, np.int64),
            np.arange(sequences + 1, dtype=np.int32),
            np.arange(sequences, dtype=np.int32),
            rng.integers(0, 99, (sequences, blocks + 2), np.int32)[:, :blocks],  # no contiguous memory
            np.arange(rows, dtype=np.int32),
        )
        post_inputs(groups[0], inputs)
        assert groups[2].wait(number - 1, 1.0) == number
        found = read_inputs(groups[2], number)
        for mine, theirs in zip(dataclasses.astuple(inputs)[:7], dataclasses.astuple(found), strict=False):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype


CHILD = """
import sys
from headrace.kernels.native import _native
group = _native.Group(int(sys.argv[1]), 1, 2)
number = group.wait(0, 20.0)
group.moves[:4] = group.mailbox(number, 4) + 1
print(group.barrier(), flush=True)
print(group.barrier())
"""


def test_between_processes(memory: int) -> None:
    group = _native.Group(memory, 0, 2)
    command = [sys.executable, "-c", CHILD, str(memory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[memory]) as child:
        threading.Thread(target=lambda: child.wait() and group.fail(), daemon=True).start()  # else we wait for ever
        group.mailbox(1, 4)[:] = [1, 2, 3, 4]
        group.post()
        assert group.barrier()
        assert group.moves[:4].tolist() == [2, 3, 4, 5]
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "True"
        group.fail()
        assert child.stdout.read().strip() == "False"
