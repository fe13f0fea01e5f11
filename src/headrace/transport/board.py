"""The status board: what every process says of itself, in one small file of shared memory in the runtime directory.

Each slot has one writer: the supervisor, the engine, each front end. Health, metrics, admission and drain only read
it; reading never waits and never asks the writer, so it still works when the writer is stopped or dead. The supervisor
makes the file. Times are nanoseconds of time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from pathlib import Path

import msgspec

from headrace.transport.slot import Slot
from headrace.transport.stats import EngineStats

_HEADER = struct.Struct("<8sIIIIII")
_MAGIC = b"HRBOARD2"


class EngineState(IntEnum):
    STARTING = 0
    READY = 1
    DEAD = 2


class SupervisorState(IntEnum):
    RUNNING = 0
    DRAINING = 1  # front ends refuse new requests and finish the running ones
    STOPPING = 2  # front ends end everything and exit


class FrontEndState(IntEnum):
    STARTING = 0
    READY = 1  # it listens and has the engine's ready message


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    state: EngineState = EngineState.STARTING
    pid: int = 0
    heartbeat_ns: int = 0
    stats: EngineStats = EngineStats()

    @property
    def heartbeat_age_s(self) -> float:
        return max(0, time.monotonic_ns() - self.heartbeat_ns) / 1e9


class FrontEndRecord(msgspec.Struct, frozen=True, kw_only=True):
    state: int = FrontEndState.STARTING
    pid: int = 0
    num_queued: int = 0  # choices that wait for their first token
    num_queued_tokens: int = 0
    num_open: int = 0  # HTTP requests in progress
    has_chat_template: int = 0
    log_level: int = 0  # that it was told to bring about, as a number of Python's logging
    log_level_ns: int = 0  # when


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of the model beside rank 0, which is the engine's own."""

    pid: int = 0
    heartbeat_ns: int = 0
    num_steps: int = 0

    @property
    def heartbeat_age_s(self) -> float:
        return max(0, time.monotonic_ns() - self.heartbeat_ns) / 1e9


class SupervisorRecord(msgspec.Struct, frozen=True, kw_only=True):
    state: int = SupervisorState.RUNNING
    pid: int = 0
    engine_is_dead: int = 0  # the supervisor has seen it die: it can no longer say so itself


_NUM_ENGINE = 3 + len(EngineStats().as_integers())
_NUM_FRONT_END = len(FrontEndRecord.__struct_fields__)
_NUM_WORKER = len(WorkerRecord.__struct_fields__)
_NUM_SUPERVISOR = len(SupervisorRecord.__struct_fields__)


class StatusBoard:
    """Slots by owner. `create` makes the file, `open` maps an existing one."""

    def __init__(self, memory: mmap.mmap, num_front_ends: int, num_ranks: int = 1) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._offset = _HEADER.size
        self.num_front_ends = num_front_ends
        self._supervisor = self._next_slot(_NUM_SUPERVISOR)
        self._engine = self._next_slot(_NUM_ENGINE)
        self._front_ends = [self._next_slot(_NUM_FRONT_END) for _ in range(num_front_ends)]
        self.num_ranks = num_ranks
        self._workers = {rank: self._next_slot(_NUM_WORKER) for rank in range(1, num_ranks)}

    @classmethod
    def create(cls, path: Path, num_front_ends: int, num_ranks: int = 1) -> StatusBoard:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            layout = (_NUM_SUPERVISOR, _NUM_ENGINE, _NUM_FRONT_END, _NUM_WORKER)
            slots = (_NUM_SUPERVISOR, _NUM_ENGINE, *[_NUM_FRONT_END] * num_front_ends, *[_NUM_WORKER] * (num_ranks - 1))
            os.ftruncate(fd, _HEADER.size + sum(Slot.size(num_fields) for num_fields in slots))
            os.pwrite(fd, _HEADER.pack(_MAGIC, num_front_ends, num_ranks, *layout), 0)
            return cls(mmap.mmap(fd, 0), num_front_ends, num_ranks)
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path) -> StatusBoard:
        fd = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        magic, num_front_ends, num_ranks, *layout = _HEADER.unpack_from(memory)
        assert magic == _MAGIC, "a board of this program"
        assert layout == [_NUM_SUPERVISOR, _NUM_ENGINE, _NUM_FRONT_END, _NUM_WORKER], "a board of this version"
        return cls(memory, num_front_ends, num_ranks)

    # ------------------------------------------------------------------ engine

    def write_engine(self, state: EngineState, stats: EngineStats) -> None:
        """The engine's, once a step and at least once a second: the write is its heartbeat."""
        self._engine.write((state, os.getpid(), time.monotonic_ns(), *stats.as_integers()))

    def read_engine(self) -> EngineRecord:
        state, pid, heartbeat_ns, *integers = self._engine.read()
        stats = EngineStats.from_integers(integers)
        return EngineRecord(state=EngineState(state), pid=pid, heartbeat_ns=heartbeat_ns, stats=stats)

    # ------------------------------------------------------------------ workers

    def write_worker(self, rank: int, record: WorkerRecord) -> None:
        """A rank's own, from 1 on: the write is its heartbeat."""
        self._workers[rank].write(msgspec.structs.astuple(record))

    def read_worker(self, rank: int) -> WorkerRecord:
        fields = self._workers[rank].read()
        return WorkerRecord(**dict(zip(WorkerRecord.__struct_fields__, fields, strict=True)))

    # ------------------------------------------------------------------ front ends

    def write_front_end(self, index: int, record: FrontEndRecord) -> None:
        self._front_ends[index].write(msgspec.structs.astuple(record))

    def read_front_end(self, index: int) -> FrontEndRecord:
        fields = self._front_ends[index].read()
        return FrontEndRecord(**dict(zip(FrontEndRecord.__struct_fields__, fields, strict=True)))

    def queued_elsewhere(self, index: int) -> tuple[int, int]:
        """Waiting choices and prompt tokens of all front ends but this one."""
        others = [self.read_front_end(other) for other in range(self.num_front_ends) if other != index]
        return sum(other.num_queued for other in others), sum(other.num_queued_tokens for other in others)

    def newest_log_level(self) -> tuple[int, int]:
        """(when, level) of what a front end was told last; zeros before that."""
        records = map(self.read_front_end, range(self.num_front_ends))
        return max((record.log_level_ns, record.log_level) for record in records)

    # ------------------------------------------------------------------ supervisor

    def write_supervisor(self, record: SupervisorRecord) -> None:
        self._supervisor.write(msgspec.structs.astuple(record))

    def read_supervisor(self) -> SupervisorRecord:
        state, pid, engine_is_dead = self._supervisor.read()
        return SupervisorRecord(state=state, pid=pid, engine_is_dead=engine_is_dead)

    @property
    def is_draining(self) -> bool:
        return self.read_supervisor().state >= SupervisorState.DRAINING

    def _next_slot(self, num_fields: int) -> Slot:
        start, size = self._offset, Slot.size(num_fields)
        self._offset += size
        return Slot(self._view[start : start + size], num_fields)
