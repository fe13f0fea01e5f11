"""Keeps a request's body in a file instead of in memory: how weights that are sent over HTTP get to the engine.

The engine maps the file and removes it; until it has the file's name, every failure removes it here: a body over its
limit, a client that leaves, a full disk. Routes that take weights call `IncomingBody` or the two functions at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from starlette.requests import Request

from headrace.errors import InvalidRequest, RequestTooLarge, Unavailable
from headrace.server.context import ServerContext, request_state

logger = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "headrace-body-"
STALE_S: Final = 3600.0

_PIECE_BYTES: Final = 4 * 1024 * 1024
_PIECE_CHUNKS: Final = 512  # one writev takes 1024 at most

Chunk = bytes | memoryview


class IncomingBody:
    """A body that is read once, from its start: `take` some bytes into memory, then `spool` the rest into a file.

    From here on the request's limit is `max_bytes`, whatever the server's limit on bodies is.
    """

    def __init__(self, request: Request, max_bytes: int) -> None:
        declared = request.headers.get("content-length", "")
        self.declared_bytes = int(declared[:20]) if declared.isdecimal() else 0
        request_state(request)["max_body_bytes"] = max_bytes
        if self.declared_bytes > max_bytes:
            raise RequestTooLarge(f"The body may have at most {max_bytes} bytes, not {self.declared_bytes}.")
        self._stream = request.stream()
        self._ahead = bytearray()  # what came together with the bytes that were taken

    async def take(self, num_bytes: int) -> bytes:
        """Exactly the next `num_bytes`. Raises InvalidRequest where the body ends before."""
        while len(self._ahead) < num_bytes:
            chunk = await anext(self._stream, None)
            if chunk is None:
                raise InvalidRequest(
                    f"The body ends {num_bytes - len(self._ahead)} bytes before the end of its header.",
                    code="invalid_frame",
                )
            self._ahead += chunk
        taken = bytes(self._ahead[:num_bytes])
        del self._ahead[:num_bytes]
        return taken

    async def spool(self, context: ServerContext) -> Path:
        """A new file, readable by this user alone, that holds what has not been taken."""
        return await _spool(self._rest(), context, self.declared_bytes)

    async def _rest(self) -> AsyncIterator[bytes]:
        if self._ahead:
            yield bytes(self._ahead)
            self._ahead.clear()
        async for chunk in self._stream:
            yield chunk


async def spool_body(request: Request, context: ServerContext, max_bytes: int) -> Path:
    """The whole body in a new file. Raises RequestTooLarge, Unavailable (no room) or ClientDisconnect; no file then."""
    return await IncomingBody(request, max_bytes).spool(context)


async def spool_bytes(context: ServerContext, data: bytes) -> Path:
    """`data` in a new file, written off the event loop. Raises Unavailable when there is no room."""

    async def whole() -> AsyncIterator[bytes]:
        yield data

    return await _spool(whole(), context, len(data))


async def remove(path: Path) -> None:
    """Removes a file if it is still there; off the event loop, because freeing gigabytes takes a while."""
    await asyncio.to_thread(path.unlink, missing_ok=True)


def remove_stale() -> None:
    """Removes what a front end or an engine that was killed has left behind. Called when a front end starts."""
    for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for path in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                status = path.stat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_S:
                    path.unlink()
                    logger.warning("removed %s: %d bytes that nobody had fetched", path, status.st_size)


async def _spool(chunks: AsyncIterator[bytes], context: ServerContext, num_bytes: int) -> Path:
    """`num_bytes`: how many are expected, to choose a place that has room; 0 when nobody knows."""
    path = _folder(context, num_bytes) / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _no_room(path.parent, error) from None
    try:
        try:
            await _write(fd, chunks)
        finally:
            os.close(fd)
    except OSError as error:
        await remove(path)
        raise _no_room(path.parent, error) from None
    except BaseException:
        await remove(path)
        raise
    return path


async def _write(fd: int, chunks: AsyncIterator[bytes]) -> None:
    """One piece is written by a thread while the next one arrives. Returns, or raises, with no write under way."""
    writing: asyncio.Task[None] | None = None
    piece: list[Chunk] = []
    num_bytes = 0
    try:
        async for chunk in chunks:
            piece.append(chunk)
            num_bytes += len(chunk)
            if num_bytes >= _PIECE_BYTES or len(piece) >= _PIECE_CHUNKS:
                if writing is not None:
                    await asyncio.shield(writing)
                writing = asyncio.create_task(asyncio.to_thread(_write_piece, fd, piece))
                piece, num_bytes = [], 0
        if writing is not None:
            await asyncio.shield(writing)
        writing = asyncio.create_task(asyncio.to_thread(_write_piece, fd, piece))
    finally:
        if writing is not None:
            await _settled(writing)


async def _settled(writing: asyncio.Task[None]) -> None:
    """Waits for a write even if the request is cancelled meanwhile: its descriptor is closed, and reused, after it."""
    cancelled = False
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    writing.result()


def _write_piece(fd: int, piece: list[Chunk]) -> None:
    while piece:
        written = os.writev(fd, piece)
        while piece and written >= len(piece[0]):
            written -= len(piece.pop(0))
        if written:
            piece[0] = memoryview(piece[0])[written:]


def _folder(context: ServerContext, num_bytes: int) -> Path:
    """Shared memory, the server's own directory or the temporary one: the first that is writable and has room."""
    places = (SHARED_MEMORY, context.runtime_dir, Path(tempfile.gettempdir()))
    for place in places:
        if place is not None and os.access(place, os.W_OK | os.X_OK) and shutil.disk_usage(place).free > num_bytes:
            return place
    named = ", ".join(str(place) for place in places if place is not None)
    raise Unavailable(f"There is no room for a body of {num_bytes} bytes in any of {named}.", code="no_space")


def _no_room(folder: Path, error: OSError) -> Unavailable:
    return Unavailable(f"The body cannot be kept in {folder}: {error.strerror}.", code="no_space")
