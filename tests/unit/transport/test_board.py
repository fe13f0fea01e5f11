"""The status board: records survive any reader and a writer that dies in the middle; processes see each other's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.transport.board import (
    EngineState,
    FrontEndRecord,
    FrontEndState,
    StatusBoard,
    SupervisorRecord,
    SupervisorState,
)
from headrace.transport.slot import Slot
from headrace.transport.stats import EngineStats

int64s = st.integers(-(2**63), 2**63 - 1)


def slot(num_fields: int) -> tuple[Slot, memoryview]:
    memory = memoryview(bytearray(Slot.size(num_fields)))
    return Slot(memory, num_fields), memory


@given(st.lists(st.tuples(int64s, int64s, int64s), min_size=1, max_size=20))
def test_the_last_record_is_read(records: list[tuple[int, int, int]]) -> None:
    writer, memory = slot(3)
    reader = Slot(memory, 3)
    assert reader.read() == (0, 0, 0)
    for record in records:
        writer.write(record)
        assert reader.read() == record
    assert Slot(memory, 3).read() == records[-1]


@given(st.binary(min_size=1, max_size=40), st.integers(0, 39))
def test_a_write_that_stopped_half_way_leaves_the_record_before_it(garbage: bytes, at: int) -> None:
    writer, memory = slot(3)
    writer.write((1, 2, 3))
    before = bytes(memory)
    writer.write((4, 5, 6))
    writer.write((7, 8, 9))
    complete = bytes(memory)
    # The copy that the third record replaced holds garbage in its middle, as if its writer had been killed there.
    half = len(memory) // 2
    changed = slice(0, half) if complete[:half] != before[:half] and before[:half] != bytes(half) else slice(half, None)
    copy = bytearray(complete[changed])
    copy[at : at + len(garbage)] = garbage[: len(copy) - at]
    if bytes(copy) == complete[changed]:
        return
    memory[changed] = copy
    assert Slot(memory, 3).read() in ((4, 5, 6), (7, 8, 9))
    restarted = Slot(memory, 3)
    restarted.write((10, 11, 12))
    assert Slot(memory, 3).read() == (10, 11, 12)


def test_a_reader_never_sees_half_a_record_nor_goes_back() -> None:
    writer, memory = slot(8)
    reader = Slot(memory, 8)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            writer.write((number,) * 8)

    thread = threading.Thread(target=write)
    thread.start()
    last = 0
    for _ in range(20_000):
        record = reader.read()
        assert len(set(record)) == 1
        assert record[0] >= last
        last = record[0]
    stop.set()
    thread.join()


def test_slots_of_all_owners_are_apart(tmp_path: Path) -> None:
    board = StatusBoard.create(tmp_path / "board", 2)
    other = StatusBoard.open(tmp_path / "board")
    assert other.num_front_ends == 2
    assert other.read_engine().state is EngineState.STARTING
    stats = EngineStats.from_integers(range(1, 1 + len(EngineStats().as_integers())))
    assert (stats.step, stats.num_expert_bytes) == (1, len(stats.as_integers()))
    board.write_engine(EngineState.READY, stats)
    board.write_front_end(0, FrontEndRecord(pid=5, num_queued=2, num_queued_tokens=30))
    board.write_front_end(1, FrontEndRecord(state=FrontEndState.READY, num_queued=1, num_queued_tokens=7, num_open=4))
    board.write_supervisor(SupervisorRecord(state=SupervisorState.DRAINING, pid=9, engine_is_dead=1))
    assert other.read_engine().stats == stats
    assert other.read_engine().heartbeat_age_s < 5
    assert other.read_front_end(0).pid == 5
    assert other.queued_elsewhere(0) == (1, 7)
    assert other.queued_elsewhere(1) == (2, 30)
    assert other.read_front_end(1).num_open == 4
    assert other.is_draining
    assert other.read_supervisor().engine_is_dead == 1
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600


def test_another_process_reads_what_a_killed_one_wrote(tmp_path: Path) -> None:
    board = StatusBoard.create(tmp_path / "board", 1)
    code = (
        "import sys, time; from pathlib import Path; from headrace.transport.board import *\n"
        "board = StatusBoard.open(Path(sys.argv[1])); step = 0\n"
        "print('up', flush=True)\n"
        "while True: step += 1; board.write_engine(EngineState.READY, EngineStats(step=step, num_running=step))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "board")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            stats = board.read_engine().stats
            assert stats.step == stats.num_running
        os.kill(process.pid, signal.SIGKILL)
    record = board.read_engine()
    assert record.state is EngineState.READY
    assert record.stats.step == record.stats.num_running > 0
    assert record.pid == process.pid


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "board").write_bytes(b"x" * 4096)
    with pytest.raises(AssertionError):
        StatusBoard.open(tmp_path / "board")
