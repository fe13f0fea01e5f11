"""The executor with several ranks on this host: rank 0 in the engine's process, each other one in a process of its own.

All ranks run each step together over one piece of shared memory (csrc/group.h), and rank 0 alone has the batch and the
sampler. What changes weights or memory is checked here first and then goes to all ranks; one that fails all the same,
or dies, ends the engine, so that no two ever compute with different weights. New weights on their way in are nobody's
yet: what fails there ends their stage alone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.options import ModelConfig
from headrace.eplb.layout import ExpertMap
from headrace.errors import ConfigError, Conflict
from headrace.executor import Grammars
from headrace.executor.base import ModelInfo, Stage
from headrace.executor.expert_moves import ExpertMoves
from headrace.executor.experts import ExpertShelf
from headrace.executor.uniproc import UniprocExecutor
from headrace.executor.workers import Workers
from headrace.kernels.native import _native
from headrace.kernels.native.backend import NativeBackend, usable_cores
from headrace.models.shard import Sharding
from headrace.models.stage import WeightStage
from headrace.transport import worker as wire
from headrace.transport.plan import StepPlan, StepResult
from headrace.types import GrammarSpec
from headrace.weights.checkpoint import fingerprint
from headrace.weights.tensor import CheckpointTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What every rank is started with."""

    num_threads: int  # of each rank
    kv_cache_dtype: str
    quantization: str | None
    board_path: Path | None
    log_level: str
    log_format: str

    @classmethod
    def of(cls, model: ModelConfig, size: int, board_path: Path | None, logs: tuple[str, str]) -> RankOptions:
        """The threads of all ranks together are as many as one rank would have. `logs`: level and format."""
        return cls(
            num_threads=max(1, (model.threads or usable_cores()) // size),
            kv_cache_dtype=model.kv_cache_dtype,
            quantization=model.quantization,
            board_path=board_path,
            log_level=logs[0],
            log_format=logs[1],
        )


class GroupStage:
    """Implements `Stage`: what rank 0 has found sound goes to all ranks, each of which keeps its part."""

    def __init__(self, own: WeightStage, number: int, workers: Workers) -> None:
        self.own = own
        self.number = number
        self._workers = workers
        self._is_broken = False

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes

    @property
    def pack_s(self) -> float:
        return self.own.pack_s

    @property
    def num_tensors(self) -> int:
        return self.own.num_tensors

    def add_path(self, path: Path) -> None:
        self.refuse_broken()
        mark = fingerprint(path)  # before the files are opened: whoever finds another one may have opened others
        checked = self.own.checked_path(path)
        self.on_all(wire.AddPath(self.number, str(path), mark), lambda: self.own.take(checked))

    def add(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        self.refuse_broken()
        checked = self.own.checked(tensors)
        places, start = [], 0
        for name, tensor in tensors.items():
            places.append(wire.TensorPlace(name, tensor.shape, tensor.kind.name, start, tensor.data.nbytes))
            start += tensor.data.nbytes
        descriptor = os.memfd_create("headrace-tensors", os.MFD_CLOEXEC)
        try:
            os.truncate(descriptor, max(1, start))
            for place, tensor in zip(places, tensors.values(), strict=True):
                _write_all(descriptor, tensor.data, place.start)
            self.on_all(wire.AddTensors(self.number, places), lambda: self.own.take(checked), descriptor)
        finally:
            os.close(descriptor)

    def check_path(self, path: Path) -> None:
        self.own.check_path(path)

    def check(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        self.own.check(tensors)

    def add_sparse(self, name: str, indices: np.ndarray, values: np.ndarray, checksum: str | None = None) -> None:
        self.add({name: self.own.changed(name, indices, values, checksum)})

    def missing(self) -> list[str]:
        return self.own.missing()

    def on_all(self, call: wire.Call, meanwhile: Callable[[], None], descriptor: int | None = None) -> None:
        """Every rank does what rank 0 has found sound. If one cannot, the stage is of no more use: it is not the same
        everywhere."""
        try:
            self._workers.call(call, "beside", meanwhile=meanwhile, descriptor=descriptor, may_fail=True)
        except BaseException:
            self._is_broken = True
            raise

    def refuse_broken(self) -> None:
        if self._is_broken:
            raise Conflict("A rank could not take some of these tensors: abort the refresh.", code="refresh_broken")


class MultiprocExecutor:
    """Implements `Executor`."""

    def __init__(
        self, model_path: Path, options: RankOptions, sharding: Sharding, name: str | None, grammars: Grammars
    ) -> None:
        """All ranks load at once. Raises CheckpointError and ConfigError, of whatever rank."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError(f"--tensor-parallel-size {sharding.size} needs Linux")
        self._numbers = itertools.count()
        descriptor = os.memfd_create("headrace-group", os.MFD_CLOEXEC)
        try:
            os.truncate(descriptor, _native.Group.num_bytes)
            group = _native.Group(descriptor, 0, sharding.size)
            self._workers = Workers(group, descriptor)
        finally:
            os.close(descriptor)
        try:
            self._workers.launch([_launch(rank, model_path, sharding, options) for rank in range(1, sharding.size)])
            backend = NativeBackend(options.num_threads, options.quantization, options.kv_cache_dtype == "int8", group)
            self._own = UniprocExecutor(
                model_path,
                backend,
                name,
                load_vocabulary=grammars.load_vocabulary,
                num_grammars_kept=grammars.num_kept,
                sharding=sharding,
            )
            self._others_bytes = self._workers.await_launch()
        except BaseException:
            self._workers.close()
            raise
        weights = self._own.weights
        specs = [replace(weights.shape.kv_spec, num_kv_heads=len(s.kv_heads)) for s in weights.shard.ranks]
        self._info = replace(
            self._own.info, kv_bytes_per_token=sum(map(backend.kv_bytes_per_token, specs)), num_ranks=sharding.size
        )
        self._kv_shape, self._has_kv = (0, 0), False
        shelf = ExpertShelf(weights, backend, group)
        self.expert_moves = None if weights.shard.experts is None else ExpertMoves(weights, shelf, self._workers, group)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self._kv_shape, self._has_kv = (num_blocks, block_size), True
        self._own.allocate(num_blocks, block_size, max_num_seqs)
        self._workers.call(wire.AllocateKV(*self._kv_shape), "between")

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        return self._own.prepare_grammar(spec)

    def execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._own.execute(plan)
        except RuntimeError:
            self._workers.check(wait_s=1.0)  # says which rank has gone
            raise

    def check(self) -> None:
        self._workers.check()

    def close(self) -> None:
        self._workers.close()
        if self.expert_moves is not None:
            self.expert_moves.close()
        self._own.close()

    # ------------------------------------------------------------------ weights and memory, between steps

    @property
    def weights_bytes(self) -> int:
        return self._own.weights_bytes + self._others_bytes

    def open_stage(self, *, is_delta: bool) -> GroupStage:
        number = next(self._numbers)
        own = self._own.weights.open_stage(is_delta=is_delta, read_base=self._read_stored)
        self._workers.call(wire.OpenStage(number, is_delta), "between")
        return GroupStage(own, number, self._workers)

    def finish(self, stage: Stage) -> None:
        group = _of_group(stage)
        group.refuse_broken()
        group.own.refuse_incomplete()  # before any rank has done anything
        group.on_all(wire.FinishStage(group.number), lambda: self._own.finish(group.own))

    def swap(self, stage: Stage) -> None:
        group = _of_group(stage)
        call = wire.SwapStage(group.number)
        self._workers.call(call, "between", meanwhile=lambda: self._own.swap(group.own))
        if self.expert_moves is not None:
            self.expert_moves.forget_shapes()

    def close_stage(self, stage: Stage) -> None:
        self._workers.call(wire.CloseStage(_of_group(stage).number), "between")

    def drop_weights(self) -> None:
        self._workers.call(wire.DropWeights(), "between", meanwhile=self._own.drop_weights)

    def weight_names(self) -> list[str]:
        return self._own.weight_names()

    def read_weight(self, name: str) -> np.ndarray:
        return self._own.weights.read(name, lambda ours: self._read_stored(ours)[0])

    def _read_stored(self, ours: str) -> tuple[np.ndarray, str]:
        """A tensor by our name, from the rows of all ranks, and the kind it is stored in."""
        weights = self._own.weights
        parts = [weights.read_own(ours)] if weights.holds(ours) else []
        replies = self._workers.call(wire.ReadWeight(ours), "beside", may_fail=True)
        parts += [_rows(reply) for reply in replies if isinstance(reply, wire.Numbers)]
        return weights.joined(ours, [rows for rows, _ in parts]), parts[0][1]

    def differing(self, stage: Stage) -> list[str]:
        group = _of_group(stage)
        group.refuse_broken()
        names: set[str] = set()
        replies = self._workers.call(
            wire.DifferingFrom(group.number),
            "beside",
            meanwhile=lambda: names.update(self._own.differing(group.own)),
            may_fail=True,
        )
        names.update(name for reply in replies if isinstance(reply, wire.Done) for name in reply.names)
        return [name for name in self.weight_names() if name in names]

    def free_kv(self) -> None:
        if self._has_kv:
            self._workers.call(wire.FreeKV(), "between", meanwhile=self._own.free_kv)
            self._has_kv = False

    def restore_kv(self) -> None:
        if not self._has_kv:  # workers would lose what they hold
            self._workers.call(wire.AllocateKV(*self._kv_shape), "between", meanwhile=self._own.restore_kv)
            self._has_kv = True

    # ------------------------------------------------------------------ experts

    @property
    def expert_map(self) -> ExpertMap | None:
        return self._own.expert_map

    @property
    def expert_layers(self) -> list[int]:
        return self._own.expert_layers

    def take_expert_counts(self) -> np.ndarray | None:
        return self._own.take_expert_counts()


def _launch(rank: int, model_path: Path, sharding: Sharding, options: RankOptions) -> wire.Launch:
    return wire.Launch(
        rank=rank,
        size=sharding.size,
        has_whole_experts=sharding.has_whole_experts,
        num_redundant=sharding.num_redundant,
        slots=sharding.slots,
        model_path=str(model_path),
        num_threads=options.num_threads,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        board_path=None if options.board_path is None else str(options.board_path),
        log_level=options.log_level,
        log_format=options.log_format,
    )


def _of_group(stage: Stage) -> GroupStage:
    assert isinstance(stage, GroupStage), "of open_stage"
    return stage


def _rows(reply: wire.Numbers) -> tuple[np.ndarray, str]:
    return np.frombuffer(reply.data, np.float32).reshape(reply.shape), reply.kind


def _write_all(descriptor: int, data: np.ndarray, start: int) -> None:
    view = np.ascontiguousarray(data).data.cast("B")
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
