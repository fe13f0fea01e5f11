"""The live requests of an engine: found by (client, id), by client, by name, and by deadline. Used by the core alone.

It holds no sequence's state; a request is added when it was accepted and removed when its last choice has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.engine.scheduler.queue import KeyedHeap
from headrace.engine.sequence import Request
from headrace.errors import DeadlineExceeded
from headrace.transport.messages import Submit
from headrace.types import RequestId


class RequestRegistry:
    """Every accepted request that still has a live choice."""

    def __init__(self) -> None:
        self._by_client: dict[int, dict[RequestId, Request]] = {}
        self._by_name: dict[str, dict[Request, None]] = {}
        self._deadlines: KeyedHeap[Request] = KeyedHeap()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        for requests in self._by_client.values():
            yield from requests.values()

    def add(self, request: Request) -> None:
        requests = self._by_client.setdefault(request.client, {})
        assert request.request_id not in requests, "two live requests with one id"
        requests[request.request_id] = request
        self._num += 1
        for name in _names(request.submit):
            self._by_name.setdefault(name, {})[request] = None
        self._watch(request, *(time for time in (request.deadline_s, request.queue_deadline_s) if time is not None))

    def remove(self, request: Request) -> None:
        requests = self._by_client[request.client]
        del requests[request.request_id]
        self._num -= 1
        if not requests:
            del self._by_client[request.client]
        for name in _names(request.submit):
            named = self._by_name[name]
            del named[request]
            if not named:
                del self._by_name[name]
        self._deadlines.discard(request)

    def get(self, client: int, request_id: RequestId) -> Request | None:
        return self._by_client.get(client, {}).get(request_id)

    def of_client(self, client: int) -> list[Request]:
        return list(self._by_client.get(client, {}).values())

    def named(self, names: Iterable[str]) -> list[Request]:
        """Requests of any client that bear one of the names, each once."""
        found: dict[Request, None] = {}
        for name in names:
            found.update(self._by_name.get(name, {}))
        return list(found)

    def pop_expired(self, now_s: float) -> list[tuple[Request, DeadlineExceeded]]:
        """Requests that have no more time, and why; they leave the deadlines, not the registry."""
        expired: list[tuple[Request, DeadlineExceeded]] = []
        while (deadline_s := self._deadlines.peek_key()) is not None and deadline_s <= now_s:
            request = self._deadlines.pop()
            submit = request.submit
            if request.deadline_s is not None and request.deadline_s <= now_s:
                why = f"the request's deadline of {submit.timeout_s:g} s has passed"
                expired.append((request, DeadlineExceeded(why)))
            elif not request.has_started:
                why = f"the request has waited for {submit.queue_timeout_s:g} s and was not started"
                expired.append((request, DeadlineExceeded(why, code="queue_timeout")))
            elif request.deadline_s is not None:
                self._watch(request, request.deadline_s)
        return expired

    def _watch(self, request: Request, *deadlines_s: float) -> None:
        if deadlines_s:
            self._deadlines.push(min(deadlines_s), request)

    def check_invariants(self) -> None:
        requests = list(self)
        assert len(requests) == self._num
        for request in requests:
            assert request.num_live == sum(seq.is_live for seq in request.sequences) > 0, (
                "a request outlived its choices"
            )
            assert self._by_client[request.client][request.request_id] is request
            assert all(request in self._by_name[name] for name in _names(request.submit))
        named = {request for group in self._by_name.values() for request in group}
        assert named <= set(requests), "a name leads to a request that has ended"
        assert set(self._deadlines) <= set(requests), "the deadline of a request that has ended is kept"


def _names(submit: Submit) -> set[str]:
    return {submit.public_id, *submit.aliases}
