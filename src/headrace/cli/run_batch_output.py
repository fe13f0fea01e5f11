"""The output of `headrace run-batch`: one line per result, appended and flushed; an earlier run's lines are known.

A run that was killed leaves whole lines and perhaps the start of one more, which is cut off. So every line of the input
has at most one line here, however often the run was broken off. A file that something else wrote is left alone. To try
failures again, a copy without them takes the file's place, so that no good line is lost whenever the run is killed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import msgspec

from headrace.cli.run_batch_lines import ID_PREFIX, BadLine, Job, Result
from headrace.errors import ConfigError, StartupError

START: Final = b'{"id":"' + ID_PREFIX.encode()


class OutputLines:
    """`with OutputLines(path) as output:`; `-` is stdout. Raises ConfigError, and StartupError when a write fails."""

    def __init__(self, path: str, *, drop_failed: bool = False) -> None:
        """`drop_failed`: lines of an earlier run that are failures go, and count as not answered."""
        if drop_failed and (path == "-" or (os.path.exists(path) and not os.path.isfile(path))):
            raise ConfigError(f"--retry-failed needs the file of an earlier run as output, and {path} is no file")
        self._path = path
        self._done_ids: set[str] = set()
        self._done_bad_lines: set[int] = set()
        self.num_done = 0
        self.num_failed = 0
        self._replaced: BinaryIO | None = None  # kept open for its lock: who opened it before must not write to it
        if path == "-":
            self._file: BinaryIO = sys.stdout.buffer
            return
        self._file = self._open(path)
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            try:
                self._lock()
                self._resume(drop_failed)
            except BaseException:
                self._close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path != "-":
            self._close()

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

    @staticmethod
    def _open(path: str) -> BinaryIO:
        try:
            return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    def _close(self) -> None:
        self._file.close()
        if self._replaced is not None:
            self._replaced.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another run") from None
        except OSError:  # a file system without locks
            return

    def _resume(self, drop_failed: bool) -> None:
        """Reads what is there, and stands behind its last whole line."""
        end, has_failures = 0, False
        for line, result in self._read():
            has_failures |= result.is_failure
            end += len(line)
            if not (drop_failed and result.is_failure):
                self._note(result)
        if drop_failed and has_failures:
            self._replace()
            return
        self._file.truncate(end)
        self._file.seek(end)

    def _read(self) -> Iterator[tuple[bytes, Result]]:
        """The whole lines."""
        decoder = msgspec.json.Decoder(Result)
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if not line.endswith(b"\n"):
                        if not START.startswith(line[: len(START)]):
                            raise msgspec.ValidationError("it ends in something else")
                        return
                    yield line, decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(
                        f"{self._path}, line {number}, is no result of a batch, so nothing is appended: {error}"
                    ) from error

    def _replace(self) -> None:
        """Goes on in a copy without the failures, which takes the file's name once it is complete."""
        path = Path(self._path).resolve()  # of a link the target
        copy_path = path.with_name(f".{path.name}.retry")
        self._replaced, self._file = self._file, self._open(str(copy_path))
        try:
            self._lock()
            self._file.truncate(0)
            os.fchmod(self._file.fileno(), stat.S_IMODE(os.fstat(self._replaced.fileno()).st_mode))
            with open(self._file.fileno(), "wb", closefd=False) as copy:
                copy.writelines(line for line, result in self._read() if not result.is_failure)
            os.fsync(self._file.fileno())
            os.replace(copy_path, path)
        except OSError as error:
            copy_path.unlink(missing_ok=True)
            raise StartupError(f"cannot write {copy_path}: {error.strerror}") from error
