"""A real `headrace serve` for end-to-end tests: starts it on a free port, waits for its ready line, ends its group.

Used by tests/e2e and by the scripts under tools/. The server's own output is kept and shown when it does not start.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

import httpx
import psutil

READY_LINE = re.compile(r"ready at (http://\S+)")


class RunningServer:
    """`with RunningServer(["--mock-engine"]) as server: httpx.get(server.url + "/livez")`."""

    def __init__(self, args: Sequence[str], *, timeout_s: float = 60.0) -> None:
        self.url = ""
        self.output: list[str] = []
        self._ready = threading.Event()
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *args]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(timeout_s) or not self.url:
            self.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.output))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output.append(line)
                if match := READY_LINE.search(line):
                    self.url = match.group(1).rstrip("/")
                    self._ready.set()
        self._ready.set()  # the end of its output: do not wait for a server that is gone

    def children(self, module: str) -> list[psutil.Process]:
        """Processes of the server whose command line names `module`, such as headrace.engine.process."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in family if module in process.cmdline()]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10.0)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, as an operator would; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def kill(self) -> None:
        """The whole process group, at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is not None:
            return
        try:
            self.terminate()
        except subprocess.TimeoutExpired:
            self.kill()
            raise
