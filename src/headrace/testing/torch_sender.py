"""A trainer for tests: forms torch process groups the way trainers do, as rank 0, and broadcasts known numbers in them.

`TorchSender` is what a test holds; this module is also the process behind it. That one imports torch once and forks a
process per group, so that one group's sender can be killed alone. The calls are those of the trainers' own
`init_custom_process_group`, on purpose not shared with the receiving side.
"""

from __future__ import annotations

import datetime
import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from headrace.weights.incoming.raw import Manifest

_PARENT_POLL_S = 0.1


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """One update: the manifest's tensors, filled by `pattern`, in one of the forms of `TransferGroup.receive`."""

    manifest: Manifest
    load_format: str | None = None
    packed_buffer_bytes: int = 1 << 30


class _Group(msgspec.Struct, frozen=True):
    name: str
    port: int
    world_size: int
    timeout_s: float
    sendings: tuple[Sending, ...]


def pattern(shape: Sequence[int], start: int) -> np.ndarray:
    """Float32 numbers that bfloat16 and float16 hold exactly; `start` is the tensor's place in its manifest."""
    numbers = (np.arange(math.prod(shape)) + start) % 251
    return (numbers.astype(np.float32) * 0.5 - 60).reshape(shape)


class TorchSender:
    """`with TorchSender() as sender: sender.start_group(...)`; all its groups end with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.testing.torch_sender"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start_group(
        self, name: str, port: int, sendings: Sequence[Sending] = (), *, world_size: int = 2, timeout_s: float = 60.0
    ) -> int:
        """Rank 0 of a new group: waits for the others, sends, and stays a member. Returns its process id at once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        group = _Group(name, port, world_size, timeout_s, tuple(sendings))
        self._process.stdin.write(msgspec.json.encode(group) + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    torch: Any = importlib.import_module("torch")
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    parent = os.getpid()
    for line in sys.stdin.buffer:
        group = msgspec.json.decode(line, type=_Group)
        if (pid := os.fork()) == 0:
            _send(torch, c10d, group)
            while os.getppid() == parent:
                time.sleep(_PARENT_POLL_S)
            os._exit(0)
        print(pid, flush=True)


def _send(torch: Any, c10d: Any, group: _Group) -> None:
    timeout = datetime.timedelta(seconds=group.timeout_s)
    meeting = c10d.rendezvous(f"tcp://127.0.0.1:{group.port}", 0, group.world_size, timeout=timeout)
    store, rank, world_size = next(meeting)
    store.set_timeout(timeout)
    process_group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(group.name, store),
        group_name=group.name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[process_group] = {i: i for i in range(world_size)}
    for sending in group.sendings:
        for tensor in _broadcasts(torch, sending):
            c10d.broadcast(tensor, src=0, group=process_group)


def _broadcasts(torch: Any, sending: Sending) -> Iterator[Any]:
    manifest = sending.manifest
    tensors = [
        torch.from_numpy(pattern(shape, i)).to(getattr(torch, dtype))
        for i, (dtype, shape) in enumerate(zip(manifest.dtypes, manifest.shapes, strict=True))
    ]
    if sending.load_format is None:
        yield from tensors
        return
    limit = math.inf if sending.load_format == "flattened_bucket" else sending.packed_buffer_bytes
    waiting: list[Any] = []
    for tensor in tensors:
        waiting.append(tensor.reshape(-1).view(torch.uint8))
        if sum(part.numel() for part in waiting) > limit:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


if __name__ == "__main__":
    main()
