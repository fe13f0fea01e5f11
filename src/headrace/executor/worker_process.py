"""A worker process: one rank of a model, without any policy. Started by `workers.py`, which also ends it.

    python -m headrace.executor.worker_process GROUP BETWEEN BESIDE BEHIND      (descriptors)

Its main thread runs the steps that rank 0 posts in the group's memory. Three more threads answer calls: one those that
come between two steps, while the main thread waits, one slow work beside the steps, and one what may not slow them
down. It goes when rank 0 does.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from headrace.errors import Conflict, HeadraceError, InvalidRequest
from headrace.executor.experts import NICENESS, ExpertShelf
from headrace.executor.weights import RankWeights
from headrace.kernels.native import _native
from headrace.kernels.native.backend import NativeBackend
from headrace.kernels.native.mailbox import read_inputs
from headrace.models.shard import Sharding
from headrace.models.stage import WeightStage
from headrace.observability.logs import configure_logging
from headrace.transport import worker as wire
from headrace.transport.board import StatusBoard, WorkerRecord
from headrace.transport.frames import receive_frame, send_frame
from headrace.transport.parent_watch import ParentWatch, leave_signals_to_supervisor, show_stacks_on_request
from headrace.weights.checkpoint import fingerprint
from headrace.weights.tensor import CheckpointTensor, TensorKind

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5


class Rank:
    """What the calls of rank 0 act on."""

    def __init__(self, launch: wire.Launch, group: _native.Group) -> None:
        """Loads this rank's weights."""
        self._group = group
        self._board = None if launch.board_path is None else StatusBoard.open(Path(launch.board_path))
        self._rank = launch.rank
        self._num_steps = 0
        has_int8_kv = launch.kv_cache_dtype == "int8"
        self._backend = NativeBackend(launch.num_threads, launch.quantization, has_int8_kv, group)
        sharding = Sharding(
            rank=launch.rank,
            size=launch.size,
            has_whole_experts=launch.has_whole_experts,
            num_redundant=launch.num_redundant,
            slots=launch.slots,
        )
        self.weights = RankWeights(Path(launch.model_path), self._backend, sharding)
        self._shelf = ExpertShelf(self.weights, self._backend, group)
        self._stages: dict[int, WeightStage] = {}

    def step(self, number: int) -> None:
        decoder = self.weights.decoder
        assert decoder is not None, "rank 0 makes no step without weights"
        self._backend.run(decoder, read_inputs(self._group, number))
        self._num_steps += 1

    def beat(self) -> None:
        """Writes this rank's slot of the status board."""
        if self._board is not None:
            record = WorkerRecord(pid=os.getpid(), heartbeat_ns=time.monotonic_ns(), num_steps=self._num_steps)
            self._board.write_worker(self._rank, record)

    def answer(self, call: wire.Call, descriptor: int | None) -> wire.Reply:
        weights = self.weights
        match call:
            case wire.AllocateKV(num_blocks, block_size):
                self._backend.allocate_kv(weights.shape.kv_spec, num_blocks, block_size)
            case wire.FreeKV():
                self._backend.free_kv()
            case wire.OpenStage(stage, is_delta):
                self._stages[stage] = weights.open_stage(is_delta=is_delta)
            case wire.AddPath(stage, path, mark):
                _take_path(self._stage(stage), Path(path), mark)
            case wire.AddTensors(stage, places):
                assert descriptor is not None, "the tensors come along"
                open_stage = self._stage(stage)
                open_stage.take(open_stage.matched(_map_tensors(places, descriptor)))
            case wire.FinishStage(stage):
                weights.finish(self._stage(stage))
            case wire.SwapStage(stage):
                weights.swap(self._stages.pop(stage))
            case wire.CloseStage(stage):
                self._stages.pop(stage, None)
            case wire.DropWeights():
                weights.drop()
            case wire.ReadWeight(name):
                return _numbers(weights.read_own(name)) if weights.holds(name) else wire.Done()
            case wire.DifferingFrom(stage):
                return wire.Done(names=weights.differing(self._stage(stage)))
            case wire.DescribeExperts(experts):
                return wire.Shapes([self._shelf.describe(layer, expert) for layer, expert in experts])
            case wire.GiveExperts(pieces):
                self._shelf.give(pieces)
            case wire.TakeExperts(pieces, shapes):
                self._shelf.take(pieces, shapes)
            case wire.PrepareExperts(slots):
                self._shelf.prepare(slots)
            case wire.PlaceExperts():
                self._shelf.place()
            case wire.ReadFormats():
                return wire.ExpertFormats(weights.expert_formats())
            case wire.RemapExperts(slots, formats):
                weights.remap(slots, formats)
            case wire.DropExperts():
                self._shelf.drop()
            case wire.Launch():
                raise AssertionError("a worker is launched once")
        return wire.Done()

    def _stage(self, number: int) -> WeightStage:
        stage = self._stages.get(number)
        if stage is None:  # an operation was given up, and its thread on rank 0 has not noticed yet
            raise Conflict("The refresh has ended.")
        return stage


def _take_path(stage: WeightStage, path: Path, mark: str) -> None:
    """The files that rank 0 has found sound, and no others."""
    tensors = stage.opened(path)
    if fingerprint(path) != mark:
        raise InvalidRequest(f"{path}: the files have changed while they were read.", param="source")
    stage.take(tensors)


def _numbers(found: tuple[np.ndarray, str]) -> wire.Reply:
    rows, kind = found
    return wire.Numbers(rows.shape, np.ascontiguousarray(rows, np.float32).tobytes(), kind)


def _map_tensors(places: list[wire.TensorPlace], descriptor: int) -> dict[str, CheckpointTensor]:
    data = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
    return {
        place.name: CheckpointTensor(
            place.name, place.shape, TensorKind[place.kind], data[place.start : place.start + place.num_bytes]
        )
        for place in places
    }


def serve(channel: socket.socket, rank: Rank, niceness: int = 0) -> None:
    """Answers calls until rank 0 is gone. A call that fails is answered by its error."""
    os.nice(niceness)  # on Linux, of this thread
    try:
        while True:
            data, descriptor = receive_frame(channel)
            try:
                reply = _answer(rank, data, descriptor)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            send_frame(channel, reply)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        logger.exception("answering rank 0 failed")
        os._exit(1)  # else it would wait for ever


def _answer(rank: Rank, data: bytes, descriptor: int | None) -> bytes:
    """The encoded reply: one that is too long to be encoded (a tensor of 4 GiB) has failed like any other."""
    try:
        return wire.encode(rank.answer(wire.decode_call(data), descriptor))
    except HeadraceError as error:
        return wire.encode(wire.Failed(type(error).__name__, str(error)))
    except (Exception, msgspec.MsgspecError) as error:
        logger.exception("a call of rank 0 failed")
        return wire.encode(wire.Failed("", f"{type(error).__name__}: {error}"))


def main(argv: list[str]) -> int:
    leave_signals_to_supervisor()
    show_stacks_on_request()
    ParentWatch()
    group_descriptor, *channels = map(int, argv[1:])
    between, beside, behind = (socket.socket(fileno=each) for each in channels)
    try:
        return start(group_descriptor, between, beside, behind)
    except (EOFError, ConnectionError):  # rank 0 could not start either
        return 1


def start(group_descriptor: int, between: socket.socket, beside: socket.socket, behind: socket.socket) -> int:
    """Loads what rank 0 says, and serves until the group fails. Returns the exit code."""
    launch = wire.decode_call(receive_frame(between)[0])
    assert isinstance(launch, wire.Launch), "the first call"
    configure_logging(launch.log_level, f"rank {launch.rank}", launch.log_format)
    group = _native.Group(group_descriptor, launch.rank, launch.size)
    try:
        rank = Rank(launch, group)
    except HeadraceError as error:
        send_frame(between, wire.encode(wire.Failed(type(error).__name__, str(error))))
        return 1
    send_frame(between, wire.encode(wire.Done(num_bytes=rank.weights.num_bytes)))
    for channel, niceness in ((between, 0), (beside, 0), (behind, NICENESS)):
        threading.Thread(target=serve, args=(channel, rank, niceness), daemon=True).start()
    return run(group, rank)


def has_failed(group: _native.Group) -> bool:
    """It may at any time."""
    return group.has_failed


def run(group: _native.Group, rank: Rank) -> int:
    """Steps, until the group fails."""
    seen, beat_s = 0, 0.0
    while True:
        if time.monotonic() - beat_s >= HEARTBEAT_S:
            rank.beat()
            beat_s = time.monotonic()
        number = group.wait(seen, HEARTBEAT_S)
        if has_failed(group):
            return 0
        if number == seen:
            continue
        try:
            rank.step(number)
        except Exception:
            if has_failed(group):  # another rank's failure ended the step
                return 0
            logger.exception("a step failed")
            return 1  # rank 0 notices, and fails the group
        seen = number


if __name__ == "__main__":
    code = main(sys.argv)
    logging.shutdown()
    os._exit(code)  # threads that answer calls do not end
