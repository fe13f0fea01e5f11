"""Bodies in files: the bytes, the mode, the limits, and that no failure leaves a file behind."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from headrace.errors import InvalidRequest, RequestTooLarge, Unavailable
from headrace.server import spool
from headrace.server.context import ServerContext
from headrace.server.spool import IncomingBody, remove_stale, spool_body, spool_bytes
from headrace.testing.front_end import FrontEnd


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go in place of /dev/shm."""
    monkeypatch.setattr(spool, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def context(front_end: FrontEnd) -> ServerContext:
    found: ServerContext = front_end.app.state.context
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def incoming(*chunks: bytes, length: int | None = None, end: str = "http.request") -> Request:
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": end, "body": b""})

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return messages.pop(0)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "method": "POST", "headers": headers, "state": {}}, receive)


async def test_the_file_has_the_bytes_and_is_private(folder: Path, context: ServerContext) -> None:
    chunks = [bytes([n % 251]) * (n * 997 % 70_000) for n in range(300)]
    path = await spool_body(incoming(*chunks), context, 1 << 30)
    assert path.parent == folder
    assert path.name.startswith("headrace-")
    assert path.read_bytes() == b"".join(chunks)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (await spool_bytes(context, b"abc")).read_bytes() == b"abc"
    assert (await spool_bytes(context, b"")).read_bytes() == b""


async def test_small_chunks_are_written_together(
    folder: Path, context: ServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = os.writev

    def counted(fd: int, pieces: Any) -> int:
        sizes.append(sum(map(len, pieces)))
        return write(fd, pieces)

    monkeypatch.setattr(os, "writev", counted)
    path = await spool_body(incoming(*[b"x" * 65536] * 200), context, 1 << 30)
    assert path.stat().st_size == sum(sizes) == 200 * 65536
    assert len(sizes) <= 4


async def test_a_write_that_takes_a_part_goes_on(
    folder: Path, context: ServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda fd, pieces: os.write(fd, pieces[0][:3]))
    path = await spool_body(incoming(b"abcdefgh", b"", b"ijk"), context, 100)
    assert path.read_bytes() == b"abcdefghijk"


async def test_take_and_then_the_rest(folder: Path, context: ServerContext) -> None:
    body = IncomingBody(incoming(b"ab", b"cdef", b"gh"), 100)
    assert await body.take(1) == b"a"
    assert await body.take(3) == b"bcd"
    assert await body.take(0) == b""
    path = await body.spool(context)
    assert path.read_bytes() == b"efgh"
    with pytest.raises(InvalidRequest, match="5 bytes before"):
        await IncomingBody(incoming(b"abc"), 100).take(8)


async def test_a_declared_length_over_the_limit_is_refused_before_anything_is_read(
    folder: Path, context: ServerContext
) -> None:
    with pytest.raises(RequestTooLarge, match="100 bytes, not 101"):
        await spool_body(incoming(length=101), context, 100)
    assert not files(folder)


@pytest.mark.parametrize("num_chunks", [0, 1, 200])
async def test_a_client_that_leaves_leaves_no_file(folder: Path, context: ServerContext, num_chunks: int) -> None:
    request = incoming(*[b"x" * 65536] * num_chunks, end="http.disconnect")
    with pytest.raises(ClientDisconnect):
        await spool_body(request, context, 1 << 30)
    assert not files(folder)


async def test_a_cancelled_request_leaves_no_file(folder: Path, context: ServerContext) -> None:
    async def receive() -> dict[str, Any]:
        if files(folder):
            arrived.set()
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"x" * (5 << 20), "more_body": True}

    arrived = asyncio.Event()
    request = Request({"type": "http", "method": "POST", "headers": [], "state": {}}, receive)
    task = asyncio.create_task(spool_body(request, context, 1 << 30))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not files(folder)


async def test_a_full_disk_is_503_and_leaves_no_file(
    folder: Path, context: ServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, pieces: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(Unavailable, match="No space left") as caught:
        await spool_body(incoming(*[b"x" * 65536] * 300), context, 1 << 30)
    assert caught.value.code == "no_space"
    assert not files(folder)


async def test_the_first_place_with_room_is_taken(
    folder: Path, context: ServerContext, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setattr(spool, "SHARED_MEMORY", folder / "missing")
    monkeypatch.setattr(spool.tempfile, "gettempdir", lambda: str(other))
    assert (await spool_bytes(context, b"x")).parent == other
    with pytest.raises(Unavailable, match="no room"):
        await spool_body(incoming(length=1 << 60), context, 1 << 61)


def test_what_a_dead_server_left_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool.tempfile, "gettempdir", lambda: str(folder))
    old, new, other = folder / "headrace-body-1", folder / "headrace-body-2", folder / "headrace-3"
    for path in (old, new, other):
        path.write_bytes(b"x")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    remove_stale()
    assert files(folder) == [other, new]


# ---------------------------------------------------------------------------------- through the application


async def test_only_weights_may_be_larger_than_other_bodies(make: Callable[..., FrontEnd], folder: Path) -> None:
    front_end = make(admission={"max_body_bytes": 1000, "max_refresh_bytes": 5000})
    headers = {"content-type": "application/x-safetensors"}
    path = "/v1/control/apply_refresh"

    async def undeclared(num_chunks: int) -> AsyncIterator[bytes]:
        for _ in range(num_chunks):
            yield b"x" * 1000

    assert (await front_end.http.post(path, content=b"x" * 4000, headers=headers)).status_code == 200
    assert (await front_end.http.post(path, content=undeclared(4), headers=headers)).status_code == 200
    spooled = files(folder)
    assert [file.stat().st_size for file in spooled] == [4000, 4000]
    for content in (b"x" * 6000, undeclared(6)):
        response = await front_end.http.post(path, content=content, headers=headers)
        assert response.status_code == 413
        assert response.headers["connection"] == "close"
    response = await front_end.http.post(path, content=b"x" * 2000)
    assert response.status_code == 413, "JSON keeps the usual limit"
    assert files(folder) == spooled


async def test_who_may_not_call_is_told_so_whatever_the_length(make: Callable[..., FrontEnd], folder: Path) -> None:
    front_end = make(admission={"max_body_bytes": 1000}, host="192.0.2.7")
    response = await front_end.http.post("/v1/control/apply_refresh", content=b"x" * 2000)
    assert (response.status_code, response.headers["connection"]) == (403, "close")
