"""Responses that are kept for GET, DELETE and `previous_response_id`: up to a number of bytes, the oldest go first.

SQLite holds them: in memory where a front end is alone, in a file of the private runtime directory where there are
several, so that each of them finds what another has made. A response belongs to the key that asked for it: no other key
finds it. Those that are being made are known too, everywhere, for as long as somebody makes them.
"""

from __future__ import annotations

import logging
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from headrace.errors import NotFound, StartupError, Unavailable
from headrace.processing.checks import shown

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S: Final = 2.0  # others hold it for less than a millisecond, if they are alive
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS kept (number INTEGER PRIMARY KEY, num_bytes INTEGER, id TEXT UNIQUE, owner BLOB,"
    " response BLOB, messages BLOB)",
    "CREATE TABLE IF NOT EXISTS total (num_bytes INTEGER)",
    "INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total)",
    "CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON kept BEGIN"
    " UPDATE total SET num_bytes = num_bytes + new.num_bytes; END",
    "CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON kept BEGIN"
    " UPDATE total SET num_bytes = num_bytes - old.num_bytes; END",
    "CREATE TABLE IF NOT EXISTS open (id TEXT PRIMARY KEY, front_end INTEGER, owner BLOB, response BLOB)",
)


class OpenResponse(Protocol):
    """One that is being made."""

    @property
    def owner(self) -> bytes: ...

    def snapshot(self) -> dict[str, Any]:
        """The response as it is now."""
        ...


@dataclass(frozen=True, slots=True)
class _MadeElsewhere:
    """An `OpenResponse` of another front end, as it was when it began."""

    owner: bytes
    response: bytes  # JSON

    def snapshot(self) -> dict[str, Any]:
        response: dict[str, Any] = msgspec.json.decode(self.response)
        return response


class ResponseStore:
    """Belongs to the event loop of its front end."""

    def __init__(self, max_bytes: int, path: Path | None = None, front_end: int = 0) -> None:
        """`path`: the file that all front ends share; None: there is one. Raises StartupError."""
        self.max_bytes = max_bytes
        self._path = path
        self._front_end = front_end
        self._open: weakref.WeakValueDictionary[str, OpenResponse] = weakref.WeakValueDictionary()
        self._forget: dict[str, Callable[[], object]] = {}
        self._db = sqlite3.connect(path or ":memory:", LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._db.close)
        try:
            self._prepare()
        except sqlite3.Error as error:
            raise StartupError(f"cannot make {path}: {error}") from error

    def __len__(self) -> int:
        (count,) = self._db.execute("SELECT COUNT(*) FROM kept").fetchone()
        return int(count)

    @property
    def num_bytes(self) -> int:
        (num_bytes,) = self._db.execute("SELECT num_bytes FROM total").fetchone()
        return int(num_bytes)

    # ------------------------------------------------------------------ being made

    def begin(self, response_id: str, response: OpenResponse) -> None:
        """One whose sender has gone is forgotten with its last reference."""
        self._open[response_id] = response
        if self._path is None:
            return
        row = (response_id, self._front_end, response.owner, msgspec.json.encode(response.snapshot()))
        with self._best_effort():
            self._db.execute("INSERT INTO open VALUES (?, ?, ?, ?)", row)
            forget = weakref.finalize(response, self._remove_open, response_id)
            forget.atexit = False
            self._forget[response_id] = forget

    def finish(self, response_id: str) -> None:
        self._open.pop(response_id, None)
        if (forget := self._forget.get(response_id)) is not None:
            forget()

    def open(self, response_id: str, owner: bytes) -> OpenResponse | None:
        found = self._open.get(response_id)
        if found is None and self._path is not None:
            row = self._row("SELECT owner, response FROM open WHERE id = ?", response_id)
            found = None if row is None else _MadeElsewhere(*row)
        return found if found is not None and found.owner == owner else None

    # ------------------------------------------------------------------ kept

    def put(self, response_id: str, owner: bytes, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keeps it, unless it is larger than all that may be kept."""
        response_json, messages_json = msgspec.json.encode(response), msgspec.json.encode(messages)
        num_bytes = len(response_json) + len(messages_json)
        if num_bytes > self.max_bytes:
            return
        row = (num_bytes, response_id, owner, response_json, messages_json)
        with self._best_effort(), self._transaction():
            self._db.execute("INSERT INTO kept VALUES (NULL, ?, ?, ?, ?, ?)", row)
            while self.num_bytes > self.max_bytes:
                self._db.execute("DELETE FROM kept WHERE number = (SELECT MIN(number) FROM kept)")

    def get(self, response_id: str, owner: bytes) -> bytes:
        """Its JSON. Raises NotFound."""
        return self._find("response", response_id, owner)

    def messages(self, response_id: str, owner: bytes) -> list[dict[str, Any]]:
        """The conversation up to and with it. Raises NotFound."""
        found = self._find("messages", response_id, owner, "previous_response_id")
        messages: list[dict[str, Any]] = msgspec.json.decode(found)
        return messages

    def delete(self, response_id: str, owner: bytes) -> None:
        """Raises NotFound."""
        self._find("response", response_id, owner)
        self._row("DELETE FROM kept WHERE id = ?", response_id)

    def _find(self, column: str, response_id: str, owner: bytes, param: str = "response_id") -> bytes:
        row = self._row(f"SELECT owner, {column} FROM kept WHERE id = ?", response_id)
        if row is None or row[0] != owner:
            raise NotFound(
                f"No response {shown(response_id)} is kept here: it was never stored, was deleted or is too old (see "
                "--response-store-bytes).",
                param=param,
                code="response_not_found",
            )
        content: bytes = row[1]
        return content

    # ------------------------------------------------------------------ the database

    def _prepare(self) -> None:
        self._db.execute("PRAGMA synchronous = OFF")  # it dies with this machine in any case
        self._db.execute("PRAGMA journal_mode = TRUNCATE")  # a process may be killed in the middle of a transaction
        with self._transaction():
            for statement in _SCHEMA:
                self._db.execute(statement)
            self._db.execute("DELETE FROM open WHERE front_end = ?", (self._front_end,))  # a dead predecessor's

    def _row(self, statement: str, response_id: str) -> tuple[Any, ...] | None:
        """Raises Unavailable when the database cannot be read."""
        if not response_id.isascii():  # none of ours, and perhaps none that can be encoded
            return None
        try:
            row: tuple[Any, ...] | None = self._db.execute(statement, (response_id,)).fetchone()
        except sqlite3.Error as error:
            raise Unavailable(f"the kept responses cannot be read: {error}", code="response_store") from error
        return row

    def _remove_open(self, response_id: str) -> None:
        self._forget.pop(response_id, None)
        with self._best_effort():
            self._db.execute("DELETE FROM open WHERE id = ?", (response_id,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _best_effort(self) -> Iterator[None]:
        """The response itself is there, and reaches its client whether it is kept or not."""
        try:
            yield
        except sqlite3.Error as error:
            logger.error("a response could not be kept: %s", error)
