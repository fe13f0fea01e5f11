"""How a child process learns that it should go: its standard input is a pipe that only the supervisor holds open.

End of file means that the supervisor closed it (an ordered stop) or died, by whatever signal: the kernel closes the
pipe in every case, so no child ever outlives its supervisor. Used by the engine, worker and front-end processes.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_STDIN = 0


class ParentWatch:
    """Calls `on_stop` when the pipe closes, and ends the process by force if it is still there `grace_s` later.

    Before `on_stop` is set there is nothing to end in order, so the process exits at once.
    """

    def __init__(self, grace_s: float = 4.0, fd: int = _STDIN) -> None:
        self.on_stop: Callable[[], None] | None = None  # called in the watch's own thread
        self._grace_s = grace_s
        self._fd = fd
        threading.Thread(target=self._run, name="parent-watch", daemon=True).start()

    def _run(self) -> None:
        while os.read(self._fd, 64):
            pass
        if self.on_stop is None:
            os._exit(0)
        self.on_stop()
        threading.Event().wait(self._grace_s)
        logger.warning("still here %.0f s after the supervisor has gone: exiting by force", self._grace_s)
        os._exit(1)


def leave_signals_to_supervisor() -> None:
    """A service manager may send SIGTERM to every process of the server; the supervisor alone acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def show_stacks_on_request() -> None:
    """SIGUSR1 writes the stack of every thread to stderr, whatever the process is doing, and disturbs nothing."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
