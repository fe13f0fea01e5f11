"""A child process of the supervisor: how it is started, asked to stop, and ended by force.

Each child leads its own session, so a signal of the terminal reaches the supervisor alone and a kill reaches the
child's own children too. Its standard input is the pipe that `transport/parent_watch.py` waits on: closing it means
"go".
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Child:
    """One running process. Belongs to the supervisor's thread."""

    def __init__(self, name: str, module: str, args: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask_to_stop(self) -> None:
        """Closes its pipe. Idempotent."""
        assert self._process.stdin is not None, "made with a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def show_stacks(self) -> None:
        """Makes it and its own children write the stacks of their threads to the log; they need a moment for that."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """The child and whatever it started, at once; also harmless when it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.ask_to_stop()

    def reap(self) -> None:
        """Waits for a killed child."""
        self._process.wait()


def start_engine(launch_path: Path) -> Child:
    return Child("engine", "headrace.engine.process", [str(launch_path)])


def start_front_end(launch_path: Path, index: int, listen_fd: int) -> Child:
    return Child(f"front end {index}", "headrace.server.process", [str(launch_path), str(index)], [listen_fd])


def explain_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
