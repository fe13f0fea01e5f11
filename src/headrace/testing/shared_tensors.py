"""The sending side of `weights/incoming/shared_memory.py`: a trainer's tensors in a new shared memory segment.

Used by tests, and small enough to copy into a trainer. Linux only, as the reader is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np

from headrace.weights.incoming.raw import Manifest
from headrace.weights.incoming.shared_memory import DIRECTORY

# numpy has no bfloat16: its bits travel as uint16.
DTYPES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}


class SharedTensors:
    """A segment that holds `arrays` one after the other; `name` and `manifest` are what the reader needs.

    The name goes with `close()`; a reader that has mapped the segment keeps its memory.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.manifest = Manifest(
            names=tuple(arrays),
            dtypes=tuple(DTYPES[array.dtype.name] for array in arrays.values()),
            shapes=tuple(array.shape for array in arrays.values()),
        )
        self.name = f"headrace-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(f"{DIRECTORY}/{self.name}", flags, 0o600), "wb") as file:
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).tobytes())

    def close(self) -> None:
        """Removes the name; may be called twice."""
        try:
            os.unlink(f"{DIRECTORY}/{self.name}")
        except FileNotFoundError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
