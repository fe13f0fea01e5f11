"""Rank 0's side of the worker processes: starts them, calls them, and notices when one has gone.

A worker that ends by itself leaves the others waiting at a barrier, so whoever notices it fails the group at once. So
does a call that some ranks have carried out and others have not: `check` then ends the engine, before another step.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from headrace import errors
from headrace.errors import HeadraceError, InternalError, StartupError
from headrace.kernels.native import _native
from headrace.transport.frames import receive_frame, send_frame
from headrace.transport.worker import Call, Done, Failed, Launch, Reply, decode_reply, encode

logger = logging.getLogger(__name__)

MODULE = "headrace.executor.worker_process"
# The kernels have a pool of their own; those of numpy's libraries would only take cores and memory.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_STOP_WAIT_S = 3.0  # less than the engine itself is given to go
_NOTICE_S = 1.0  # in which the end of a process is noticed, once its sockets are closed

When = Literal["between", "beside", "behind"]
"""Between two steps, by the engine's thread; beside them, by any one thread; or behind them: likewise, with what the
steps leave of the cores."""
_WHENS: tuple[When, ...] = get_args(When)


class WorkerDied(HeadraceError):
    """A rank is gone, or is no longer like the others, and with it the model."""


class Worker:
    """One process, from construction to `close`."""

    def __init__(self, rank: int, group_descriptor: int) -> None:
        self.rank = rank
        self._channels: dict[When, socket.socket] = {}
        theirs: list[socket.socket] = []
        for when in _WHENS:
            ours, other = socket.socketpair()
            self._channels[when] = ours
            theirs.append(other)
        descriptors = [group_descriptor, *(other.fileno() for other in theirs)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *map(str, descriptors)],
            env={**os.environ, **_ONE_THREAD},
            stdin=subprocess.PIPE,  # held open: its end tells the worker that this process is gone
            pass_fds=descriptors,  # and in our process group, so that who kills that also ends one that hangs
        )
        for other in theirs:
            other.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, call: Call, when: When, descriptor: int | None = None) -> None:
        try:
            send_frame(self._channels[when], encode(call), descriptor)
        except OSError as error:
            raise WorkerDied(f"rank {self.rank} is gone: {error}") from None

    def receive(self, when: When) -> Reply:
        try:
            return decode_reply(receive_frame(self._channels[when])[0])
        except (EOFError, OSError):
            raise WorkerDied(f"rank {self.rank} is gone") from None

    def wait(self) -> int:
        return self._process.wait()

    def let_go(self) -> None:
        """Tells the process to end."""
        for channel in self._channels.values():
            channel.close()
        assert self._process.stdin is not None, "made with a pipe"
        self._process.stdin.close()

    def close(self, deadline_s: float) -> None:
        """Ends the process: by itself, or by force at a time of time.monotonic()."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Workers:
    """Ranks 1 to N - 1."""

    def __init__(self, group: _native.Group, group_descriptor: int) -> None:
        self._group = group
        self._death: str | None = None
        self._has_died = threading.Event()
        self._is_ready = False
        self._is_closing = False
        self._lock = threading.Lock()
        self._locks: dict[When, threading.Lock] = {when: threading.Lock() for when in _WHENS}
        self._workers = [Worker(rank, group_descriptor) for rank in range(1, group.size)]
        for worker in self._workers:
            threading.Thread(target=self._watch, args=(worker,), name=f"rank-{worker.rank}", daemon=True).start()

    def launch(self, launches: Sequence[Launch]) -> None:
        """Tells each what to load; `await_launch` has the outcome."""
        try:
            for worker, launch in zip(self._workers, launches, strict=True):
                worker.send(launch, "between")
        except WorkerDied as error:
            raise self._failed_start(error) from None

    def await_launch(self) -> int:
        """Bytes of all their weights. Raises what a worker has raised, CheckpointError and ConfigError among it."""
        try:
            replies = [worker.receive("between") for worker in self._workers]
        except WorkerDied as error:
            raise self._failed_start(error) from None
        num_bytes = sum(reply.num_bytes for reply in _sound(replies) if isinstance(reply, Done))
        self._is_ready = True
        return num_bytes

    def _failed_start(self, error: WorkerDied) -> StartupError:
        self._has_died.wait(_NOTICE_S)  # who watches the process knows more
        return StartupError(f"{self._death or error} before it was ready")

    def check(self, wait_s: float = 0.0) -> None:
        """Raises WorkerDied once a worker has ended, or differs from the others. `wait_s`: for what has just begun to
        show."""
        if self._death is None and wait_s:
            self._has_died.wait(wait_s)
        if self._death is not None:
            raise WorkerDied(self._death)

    def call(
        self,
        call: Call,
        when: When,
        *,
        meanwhile: Callable[[], Any] = lambda: None,
        descriptor: int | None = None,
        may_fail: bool = False,
    ) -> list[Reply]:
        """All workers do it, and this process does something `meanwhile`; the replies by rank, from 1 on."""
        calls = [call] * len(self._workers)
        return self.call_each(calls, when, meanwhile=meanwhile, descriptor=descriptor, may_fail=may_fail)

    def call_each(
        self,
        calls: Sequence[Call],
        when: When,
        *,
        meanwhile: Callable[[], Any] = lambda: None,
        descriptor: int | None = None,
        may_fail: bool = False,
    ) -> list[Reply]:
        """As `call`, with something else for each. All answer before an error of any is raised: by its class if the
        call `may_fail`, because ranks compute alike whether it succeeds or not; else as WorkerDied, and the group has
        failed."""
        try:
            with self._locks[when]:
                for worker, call in zip(self._workers, calls, strict=True):
                    worker.send(call, when, descriptor)
                try:
                    meanwhile()
                finally:
                    replies = [worker.receive(when) for worker in self._workers]
            return _sound(replies)
        except WorkerDied as error:
            if not self._is_closing:
                self._has_died.wait(_NOTICE_S)  # who watches the process knows more
            self._end(str(error))
            raise WorkerDied(self._death or str(error)) from None
        except BaseException as error:
            if may_fail:
                raise
            self._end(f"{type(calls[0]).__name__} did not succeed on every rank: {type(error).__name__}: {error}")
            raise WorkerDied(self._death or str(error)) from error

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._is_closing = True
        self._group.fail()  # ends their wait for steps
        for worker in self._workers:
            worker.let_go()
        deadline_s = time.monotonic() + _STOP_WAIT_S
        for worker in self._workers:
            worker.close(deadline_s)
        self._workers = []

    def _watch(self, worker: Worker) -> None:
        code = worker.wait()
        self._end(f"rank {worker.rank} (process {worker.pid}) has ended with code {code}")

    def _end(self, reason: str) -> None:
        """No step may come any more. The first reason counts: the end of one rank ends others."""
        with self._lock:
            if self._is_closing or self._death is not None:
                return
            self._death = reason
        self._group.fail()
        self._has_died.set()
        if self._is_ready:
            logger.error("%s", reason)


def _sound(replies: list[Reply]) -> list[Reply]:
    for rank, reply in enumerate(replies, 1):
        if isinstance(reply, Failed):
            kind = getattr(errors, reply.error, None)
            if isinstance(kind, type) and issubclass(kind, HeadraceError):
                raise kind(reply.message)
            raise InternalError(f"rank {rank}: {reply.message}")
    return replies
