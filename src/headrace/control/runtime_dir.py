"""The server's private directory, made and removed by the supervisor: socket, status board, launch file.

Only its owner may enter it (mode 0700). A supervisor that was killed leaves it behind; the next one to start sweeps it
up: a lock that the kernel drops with its holder tells a dead one's directory from a living one's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from headrace.errors import StartupError
from headrace.transport.sockets import MAX_IPC_PATH_BYTES

_PREFIX: Final = "headrace-"
_LOCK: Final = "lock"
_MIN_AGE_S: Final = 60.0
_ROOM_FOR_NAMES: Final = 30  # headrace-xxxxxxxx/engine.sock


class RuntimeDir:
    """`with RuntimeDir() as path:`"""

    def __init__(self, base: Path | None = None) -> None:
        self._base = base if base is not None else _default_base()
        self.path: Path | None = None
        self._lock_fd = -1

    def __enter__(self) -> Path:
        _sweep(self._base)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._base))
            self._lock_fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise StartupError(f"cannot make a runtime directory in {self._base}: {error.strerror}") from None
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.path is not None, "entered"
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _default_base() -> Path:
    """The user's runtime directory or the temporary one; /tmp where their path leaves no room for a socket's name."""
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if not candidate or not os.access(candidate, os.W_OK):
            continue
        if len(os.fsencode(candidate)) + _ROOM_FOR_NAMES <= MAX_IPC_PATH_BYTES:
            return Path(candidate)
    return Path("/tmp")


def _sweep(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            status = path.stat()
            is_new = time.time() - status.st_mtime < _MIN_AGE_S  # its lock may be made but not yet held
            if status.st_uid == os.getuid() and not is_new and _is_abandoned(path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(lock: Path) -> bool:
    """False too where there is no lock: it may be about to be made."""
    fd = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(fd)
