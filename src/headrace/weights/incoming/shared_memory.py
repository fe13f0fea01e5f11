"""Reads tensors from a shared memory segment of a trainer on the same machine. Nothing is copied.

The segment is a file in /dev/shm, made by `shm_open`, Python's `SharedMemory` or a plain `open`; only its name and a
manifest travel. The mapping lives as long as a view of it, also when the sender has unlinked the name. The sender must
neither shrink nor write the segment until the update is answered: a page that is gone kills its reader (SIGBUS).
"""

from __future__ import annotations

import mmap
import os
import stat

from headrace.errors import InvalidRequest
from headrace.weights.incoming.raw import Manifest, read_raw
from headrace.weights.tensor import CheckpointTensor

DIRECTORY = "/dev/shm"
MAX_SEGMENT_NAME_LENGTH = 255  # NAME_MAX


def read_shared_memory(segment: str, manifest: Manifest) -> dict[str, CheckpointTensor]:
    """All tensors by name, as views of the mapped segment, whose size must be exactly what the manifest covers.

    Raises InvalidRequest for a name that is no plain file name, and for a segment that is missing or another user's.
    """
    return read_raw(_map_segment(segment), manifest)


def _map_segment(segment: str) -> mmap.mmap:
    what = f"shared memory segment {segment[:80]!r}"
    is_plain = segment.isascii() and segment.isprintable() and "/" not in segment and segment not in ("", ".", "..")
    if not is_plain or len(segment) > MAX_SEGMENT_NAME_LENGTH:
        raise InvalidRequest(
            f"{what} is no name of a segment; allowed: the ASCII name of a file in {DIRECTORY}, without slashes, "
            f"of at most {MAX_SEGMENT_NAME_LENGTH} characters."
        )
    try:
        # A link could lead out of the folder, and opening a named pipe would wait for its writer.
        file = os.open(f"{DIRECTORY}/{segment}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"{what} cannot be opened: {error.strerror or error}.") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"{what} is not a regular file.")
        if status.st_uid != os.geteuid():
            raise InvalidRequest(f"{what} belongs to user {status.st_uid}; only user {os.geteuid()}'s are read.")
        if status.st_size == 0:
            raise InvalidRequest(f"{what} is empty.")
        return mmap.mmap(file, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be mapped: {error}.") from None
    finally:
        os.close(file)
