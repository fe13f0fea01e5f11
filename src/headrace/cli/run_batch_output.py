"""The output of `headrace run-batch`: one line per result, appended and flushed; an earlier run's lines are known.

A run that was killed leaves whole lines and perhaps the start of one more, which is cut off. So every line of the input
has at most one line here, however often the run was broken off. A file that something else wrote is left alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from types import TracebackType
from typing import BinaryIO, Final, Self

import msgspec

from headrace.cli.run_batch_lines import ID_PREFIX, BadLine, Job, Result
from headrace.errors import ConfigError, StartupError

START: Final = b'{"id":"' + ID_PREFIX.encode()


class OutputLines:
    """`with OutputLines(path) as output:`; `-` is stdout. Raises ConfigError, and StartupError when a write fails."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._done_ids: set[str] = set()
        self._done_bad_lines: set[int] = set()
        self.num_done = 0
        self.num_failed = 0
        if path == "-":
            self._file: BinaryIO = sys.stdout.buffer
            return
        try:
            self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            try:
                self._lock()
                self._resume()
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path != "-":
            self._file.close()

    def has(self, line: Job | BadLine) -> bool:
        """Whether an earlier run has answered it: by its custom_id, or by its number where it has none."""
        if line.custom_id is None:
            return line.number in self._done_bad_lines
        return line.custom_id in self._done_ids

    def write(self, result: Result) -> None:
        """Appends one line; once it returns, the line outlives this process."""
        rest = memoryview(msgspec.json.encode(result) + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StartupError(f"cannot write {self._path}: {error.strerror}") from error
        self._note(result)

    def _note(self, result: Result) -> None:
        self.num_done += 1
        self.num_failed += result.is_failure
        if result.custom_id is not None:
            self._done_ids.add(result.custom_id)
        elif result.error is not None:
            self._done_bad_lines.add(result.error.line)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another run") from None
        except OSError:  # a file system without locks
            return

    def _resume(self) -> None:
        """Reads what is there, and stands behind its last whole line."""
        end = 0
        decoder = msgspec.json.Decoder(Result)
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if not line.endswith(b"\n"):
                        if not START.startswith(line[: len(START)]):
                            raise msgspec.ValidationError("it ends in something else")
                        break
                    self._note(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(
                        f"{self._path}, line {number}, is no result of a batch, so nothing is appended: {error}"
                    ) from error
                end += len(line)
        self._file.truncate(end)
        self._file.seek(end)
