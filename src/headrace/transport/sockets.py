"""The sockets between front ends and the engine: ROUTER on the engine's side, one DEALER per front end, over ipc://.

No send ever blocks: the queues have no high-water mark, because what may be in them is bounded elsewhere (admission
bounds what front ends send; the running requests bound what the engine sends). A peer that has gone is dropped in
silence.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

import zmq

from headrace.errors import StartupError

MAX_IPC_PATH_BYTES = 100  # the kernel's limit for a socket path is 108 on Linux, 104 elsewhere
_LAST_WORDS_MS = 1000  # how long a closing socket may still deliver what was sent
_write: Final = ctypes.PyDLL(None).write


def ipc_endpoint(runtime_dir: Path) -> str:
    path = str(runtime_dir / "engine.sock")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise StartupError(f"this path is too long for a socket, set TMPDIR to a shorter one: {path}")
    return f"ipc://{path}"


def bind_engine(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    _set_unbounded(socket)
    socket.bind(endpoint)
    return socket


def connect_front_end(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    """`identity` is of one incarnation of a front end: the engine never mistakes it for the one before."""
    socket = context.socket(zmq.DEALER)
    _set_unbounded(socket)
    socket.set(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    return socket


def _set_unbounded(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, _LAST_WORDS_MS)


class Waker:
    """Wakes a thread that polls a file descriptor; any thread may call `wake`, and many calls cost one byte.

    It writes without letting go of the interpreter, as `os.write` would: the thread that wakes up would take it, and
    on a busy machine the engine would wait a millisecond and more before it could go on to the next forward pass.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        _write(self._write_fd, b"\0", 1)  # fails when the pipe is full: it is awake for certain

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)
