"""Starts, asks and ends the receiver process of a `TransferGroup`. Called by `process_group.py` alone.

One thread asks at a time; `kill()` may come from any thread, and ends a question that is being waited for.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from headrace.weights.incoming.receiver_wire import Command, Done, Failed, receive_message, send_message

MODULE = "headrace.weights.incoming.receiver_process"
_LAST_WORDS_BYTES = 8192
_KILL_WAIT_S = 10.0

# The receiver waits and copies; a pool of threads would only take cores from the kernels.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class ReceiverDied(Exception):
    """The process is gone; `last_words` is the end of its output."""

    def __init__(self, last_words: str) -> None:
        super().__init__(last_words)
        self.last_words = last_words


class ReceiverClient:
    """The process lives from construction to `close()`, or until this process ends."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._output = os.memfd_create("headrace-receiver-output", os.MFD_CLOEXEC)  # a pipe could fill up
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C is for the server, which then ends this process
            )

    def ask(self, command: Command, deadline: float, descriptor: int | None = None) -> Failed | None:
        """Sends a command and blocks for its outcome; None is success.

        Raises TimeoutError at `deadline` (by time.monotonic()), and ReceiverDied when the process ended, whoever
        ended it. After either only `kill()` and `close()` make sense.
        """
        try:
            self._channel.settimeout(None)
            send_message(self._channel, command, descriptor)
            reply, _ = receive_message(self._channel, deadline)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            raise ReceiverDied(self._last_words()) from None
        assert isinstance(reply, Done | Failed)
        return reply if isinstance(reply, Failed) else None

    def kill(self) -> None:
        """Ends the process at once, and with it whatever it blocks in. Any thread, any number of times."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and frees what is held here; not while another thread asks. May be called twice."""
        self.kill()
        self._process.wait(_KILL_WAIT_S)
        self._channel.close()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _last_words(self) -> str:
        self._process.wait(_KILL_WAIT_S)
        size = os.fstat(self._output).st_size
        return os.pread(self._output, _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES)).decode(errors="replace")
