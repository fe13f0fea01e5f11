"""What /v1/responses keeps: how much, whose, and that each front end of a server finds what another has made."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import NotFound, Unavailable
from headrace.server import response_store
from headrace.server.response_store import ResponseStore
from headrace.testing.front_end import FakeClient, FrontEnd

Make = Callable[..., FrontEnd]
PATH = "/v1/responses"


class Reply:
    """One that is being made."""

    owner = b"key"

    def snapshot(self) -> dict[str, Any]:
        return {"status": "in_progress"}


@pytest.fixture(params=[None, "responses.db"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param is None else tmp_path / request.param


def test_what_fits_is_kept_the_newest_last(path: Path | None) -> None:
    store = ResponseStore(80, path)
    for name in ("a", "b", "c"):
        store.put(name, b"", {"id": name * 20}, [])
    assert store.num_bytes <= 80
    with pytest.raises(NotFound):
        store.get("a", b"")
    assert store.get("c", b"") == b'{"id":"' + b"c" * 20 + b'"}'
    store.put("d", b"", {"id": "d" * 200}, [])
    with pytest.raises(NotFound):
        store.get("d", b"")
    for name in ("b", "c"):
        store.delete(name, b"")
    assert (len(store), store.num_bytes) == (0, 0)


def test_one_that_is_being_made_is_known_until_it_ends_or_is_left(path: Path | None) -> None:
    store = ResponseStore(80, path)
    for is_left in (False, True):
        reply = Reply()
        store.begin("a", reply)
        found = store.open("a", b"key")
        assert found is reply
        assert store.open("a", b"other key") is None
        if not is_left:
            store.finish("a")
        del reply, found
        assert store.open("a", b"key") is None
    store.finish("never begun")


def test_the_limit_is_over_all_front_ends(tmp_path: Path) -> None:
    stores = [ResponseStore(80, tmp_path / "db", index) for index in range(2)]
    for number in range(10):
        stores[number % 2].put(f"r{number}", b"key", {"id": "x" * 20}, [])
    assert stores[0].num_bytes == stores[1].num_bytes <= 80
    assert len(stores[0]) == 2
    assert stores[0].get("r9", b"key") == stores[1].get("r9", b"key")
    with pytest.raises(NotFound):
        stores[0].get("r9", b"other key")
    stores[0].delete("r9", b"key")
    with pytest.raises(NotFound, match="r9"):
        stores[1].messages("r9", b"key")


def test_a_restarted_front_end_keeps_what_was_kept_and_forgets_what_was_being_made(tmp_path: Path) -> None:
    first, other = (ResponseStore(80, tmp_path / "db", index) for index in range(2))
    replies = [Reply(), Reply()]
    first.begin("of the dead", replies[0])
    other.begin("of the living", replies[1])
    first.put("kept", b"key", {}, [])
    ResponseStore(80, tmp_path / "db", 0)
    assert other.open("of the dead", b"key") is None
    assert first.open("of the living", b"key") is not None
    assert other.get("kept", b"key") == b"{}"


def test_a_database_that_is_locked_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "LOCK_TIMEOUT_S", 0.01)
    store = ResponseStore(80, tmp_path / "db")
    reply = Reply()
    lock = sqlite3.connect(tmp_path / "db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    store.begin("a", reply)
    store.put("a", b"key", {}, [])
    store.finish("a")
    with pytest.raises(Unavailable):
        store.get("a", b"key")
    lock.close()
    with pytest.raises(NotFound):
        store.get("a", b"key")
    store.put("a", b"key", {}, [])
    assert store.get("a", b"key") == b"{}"


@pytest.mark.parametrize("name", ["", "\0", "\ud800", "é", "x" * 5000, "' OR 1=1 --"])
def test_any_text_may_be_asked_for(name: str) -> None:
    with pytest.raises(NotFound):
        ResponseStore(80).get(name, b"")


async def test_each_front_end_finds_what_another_has_made(make: Make, tmp_path: Path) -> None:
    client = FakeClient()
    options = {"runtime_dir": tmp_path, "server": {"api_servers": 2}}
    one, other = make(front_end=0, client=client, **options), make(front_end=1, **options)
    made = (await one.post(PATH, {"input": "Hi"})).json()
    path = f"{PATH}/{made['id']}"
    assert (await other.http.get(path)).json() == made
    more = await other.post(PATH, {"input": "More", "previous_response_id": made["id"]})
    assert more.status_code == 200
    assert bytes(t for t in other.submit.prompts[0] if t < 256).startswith(b"user\nHi\nassistant\nHello\nuser\nMore")
    assert (await one.http.delete(f"{PATH}/{more.json()['id']}")).status_code == 200

    client.gate.clear()
    client.submitted.clear()
    task = asyncio.create_task(one.post(PATH, {"input": "Hi", "stream": True}))
    await asyncio.wait_for(client.submitted.wait(), 5)
    await asyncio.wait_for(client.streams[-1].is_read.wait(), 5)
    path = f"{PATH}/{one.submit.public_id}"
    assert (await other.http.get(path)).json()["status"] == "in_progress"
    assert (await other.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert other.client.aborts[-1][1] == [one.submit.public_id]
    client.gate.set()
    await task
    assert (await other.http.get(path)).json()["status"] == "completed"
    assert (await other.post(f"{path}/cancel")).status_code == 400
