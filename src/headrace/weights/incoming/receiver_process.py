"""The process in which torch runs for a `TransferGroup`: it joins the trainer's group and takes part in broadcasts.

Started by `receiver_client.py` as `python -m headrace.weights.incoming.receiver_process DESCRIPTOR`, one per group. A
process of its own because gloo ends its process when a broadcast brings more bytes than expected, because a blocked
call of torch cannot be interrupted, and because the engine shall hold no torch. It goes when its other side does.

The group is formed as trainers form it (OpenRLHF and all that followed): a TCPStore on rank 0, a prefix of the group's
name, and torch's helper for groups. torch's default group does not come into it.
"""

from __future__ import annotations

import datetime
import importlib
import mmap
import os
import queue
import socket
import sys
import threading
from typing import Any

import numpy as np

from headrace.weights.incoming.receiver_wire import (
    COUNTER_BYTES,
    NCCL,
    NO_GPU,
    NO_TORCH,
    SHORT,
    TORCH,
    Done,
    Failed,
    Join,
    Message,
    Receive,
    Reply,
    receive_message,
    send_message,
)

BACKSTOP_S = 30.0

# gloo does not say when a broadcast brought fewer bytes than there is room for. The last number therefore begins as a
# NaN that no arithmetic makes, in float16 and bfloat16 alike, and in a float32's upper half.
_MARK = np.array([0xA5, 0xFF], np.uint8)


class _Refused(Exception):
    """Ends a command with `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TorchGroup:
    """One joined group. Blocks in `__init__` until gloo's members have met (nccl's meet in the first broadcast)."""

    def __init__(self, command: Join) -> None:
        try:
            # Not an import statement: modules that the server loads must have none, and it does not load this one.
            torch: Any = importlib.import_module("torch")
            c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
        except ImportError as error:
            raise _Refused(NO_TORCH, str(error)) from None
        torch.set_num_threads(1)
        if command.backend == NCCL and not (c10d.is_nccl_available() and torch.cuda.is_available()):
            raise _Refused(NO_GPU, "torch finds no GPU")
        timeout = datetime.timedelta(seconds=command.timeout_s + BACKSTOP_S)
        is_host = command.rank == 0
        store = torch.distributed.TCPStore(
            command.host, command.port, command.world_size, is_host, timeout=timeout, multi_tenant=True
        )
        self._group, _ = c10d._new_process_group_helper(
            command.world_size,
            command.rank,
            [],
            c10d.Backend(command.backend),
            c10d.PrefixStore(command.group_name, store),
            group_name=command.group_name,
            timeout=timeout,
        )
        self._torch, self._options = torch, c10d.BroadcastOptions()
        self._is_on_gpu = command.backend == NCCL

    def receive(self, command: Receive, descriptor: int) -> None:
        """Fills the mapped file, broadcast by broadcast. The sender's dtype does not matter: bytes travel."""
        self._options.rootRank, self._options.rootTensor = command.src, 0
        data = np.frombuffer(mmap.mmap(descriptor, sum(command.sizes) + COUNTER_BYTES), np.uint8)
        counter = data[-COUNTER_BYTES:].view()
        start = 0
        for i, size in enumerate(command.sizes):
            part = data[start : start + size]
            part[-2:] = _MARK[:size]
            self._broadcast(part)
            if size and np.array_equal(part[-2:], _MARK):
                raise _Refused(SHORT, f"broadcast {i} brought fewer than {size} bytes")
            start += size
            counter[:] = np.frombuffer((i + 1).to_bytes(COUNTER_BYTES, "little"), np.uint8)

    def _broadcast(self, part: np.ndarray) -> None:
        tensor = self._torch.from_numpy(part)
        if not self._is_on_gpu:
            self._group.broadcast([tensor], self._options).wait()
            return
        on_gpu = self._torch.empty(part.size, dtype=self._torch.uint8, device="cuda")
        self._group.broadcast([on_gpu], self._options).wait()
        tensor.copy_(on_gpu)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[tuple[Message, int | None]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
    group: TorchGroup | None = None
    while True:
        command, descriptor = inbox.get()
        reply: Reply = Done()
        try:
            if isinstance(command, Join):
                group = TorchGroup(command)
            elif isinstance(command, Receive):
                assert group is not None
                assert descriptor is not None
                group.receive(command, descriptor)
        except _Refused as error:
            reply = Failed(error.code, str(error))
        except Exception as error:  # whatever torch raises is for the other side to report
            reply = Failed(TORCH, str(error) or type(error).__name__)
        if descriptor is not None:
            os.close(descriptor)
        send_message(channel, reply)


def _read(channel: socket.socket, inbox: queue.SimpleQueue[tuple[Message, int | None]]) -> None:
    """Runs in a thread of its own, so that the end of the other side is seen also while torch blocks."""
    try:
        while True:
            inbox.put(receive_message(channel))
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
