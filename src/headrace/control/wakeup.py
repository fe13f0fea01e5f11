"""Signals for a loop that sleeps: SIGTERM, SIGINT and SIGCHLD end its sleep at once.

Used by the supervisor, in its main thread. The handlers only take a note; the loop acts.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalWakeup:
    """`with SignalWakeup() as wakeup:`; puts the former handlers back at the end."""

    def __init__(self) -> None:
        self.stop_signals: list[int] = []  # in the order of their coming
        self._reader, self._writer = socket.socketpair()
        self._former: dict[int, Any] = {}
        self._former_fd = -1

    def sleep(self, seconds: float) -> None:
        """Until a signal comes, at most so long."""
        select.select([self._reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def __enter__(self) -> SignalWakeup:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            self._former[number] = signal.signal(number, self._take_note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._reader.close()
        self._writer.close()

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        if number in _STOP_SIGNALS:
            self.stop_signals.append(number)
