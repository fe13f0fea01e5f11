"""What the supervisor tells its children, as one private file in the runtime directory.

It holds the keys, so it is readable by its owner alone and nothing of it is ever in argv, the environment or a log.
Written by `control/supervisor.py`; read by `engine/process.py` and `server/process.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from headrace.config.options import ServeConfig


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One server: its resolved options, and where its processes meet."""

    config: ServeConfig
    model_path: str | None  # None with the mock engine
    runtime_dir: str
    endpoint: str  # of the engine's socket
    listen_fds: tuple[int, ...] = ()  # one listening socket per front end, inherited under this number

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names by which requests may call the model; the first one is what replies say."""
        model = self.config.engine.model
        return model.served_model_name or (("echo",) if self.model_path is None else (model.model,))

    @property
    def board_path(self) -> Path:
        return Path(self.runtime_dir) / "board"

    @property
    def failure_path(self) -> Path:
        """Where a child that cannot start leaves its one line for the supervisor to print."""
        return Path(self.runtime_dir) / "failure"

    def write(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> Launch:
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def fail(self, message: str) -> None:
        """Leaves the line that says why this child cannot start. The first one stays."""
        try:
            fd = os.open(self.failure_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(" ".join(message.split()))
