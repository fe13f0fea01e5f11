"""Responses that are kept for GET, DELETE and `previous_response_id`: in this process, up to a number of bytes.

The oldest go first. A response belongs to the key that asked for it: no other key finds it. Those that are being made
are known too, for as long as somebody makes them. With several front ends each has its own store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from headrace.errors import NotFound
from headrace.processing.checks import shown


class OpenResponse(Protocol):
    """One that is being made."""

    @property
    def owner(self) -> bytes: ...

    def snapshot(self) -> dict[str, Any]:
        """The response as it is now."""
        ...


@dataclass(frozen=True, slots=True)
class _Stored:
    owner: bytes
    response: bytes  # JSON
    messages: bytes  # JSON: the conversation, this response's own message last

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Belongs to the event loop of its front end."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._open: WeakValueDictionary[str, OpenResponse] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def begin(self, response_id: str, response: OpenResponse) -> None:
        """One whose sender has gone is forgotten with its last reference."""
        self._open[response_id] = response

    def finish(self, response_id: str) -> None:
        self._open.pop(response_id, None)

    def open(self, response_id: str, owner: bytes) -> OpenResponse | None:
        found = self._open.get(response_id)
        return found if found is not None and found.owner == owner else None

    def put(self, response_id: str, owner: bytes, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keeps it, unless it is larger than all that may be kept."""
        stored = _Stored(owner, msgspec.json.encode(response), msgspec.json.encode(messages))
        if stored.num_bytes > self.max_bytes:
            return
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self.max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str, owner: bytes) -> bytes:
        """Its JSON. Raises NotFound."""
        return self._find(response_id, owner).response

    def messages(self, response_id: str, owner: bytes) -> list[dict[str, Any]]:
        """The conversation up to and with it. Raises NotFound."""
        stored = self._find(response_id, owner, "previous_response_id")
        messages: list[dict[str, Any]] = msgspec.json.decode(stored.messages)
        return messages

    def delete(self, response_id: str, owner: bytes) -> None:
        """Raises NotFound."""
        self._num_bytes -= self._find(response_id, owner).num_bytes
        del self._stored[response_id]

    def _find(self, response_id: str, owner: bytes, param: str = "response_id") -> _Stored:
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise NotFound(
                f"No response {shown(response_id)} is kept here: it was never stored, was deleted or is too old (see "
                "--response-store-bytes), or another front end has it (--api-servers).",
                param=param,
                code="response_not_found",
            )
        return stored
