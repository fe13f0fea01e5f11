"""The control half of a fake engine client: records what is asked of it and replies as the engine would, at once.

`FakeClient` holds one. Operations wait at `gate`, queries do not; `replies` and `errors` are what a test wants instead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.errors import NotFound, RequestError

STATUS: dict[str, Any] = {
    "state": "ready",
    "reason": None,
    "asleep": [],
    "is_paused": False,
    "pause_mode": None,
    "is_draining": False,
    "version": "0",
    "epoch": 0,
    "refresh": None,
    "operation": None,
    "num_running": 2,
    "num_waiting": 1,
}

EXPERTS: dict[str, Any] = {
    "num_layers": 2,
    "layers": [1, 2],
    "num_experts": 4,
    "num_slots": 6,
    "num_ranks": 2,
    "is_expert_parallel": True,
    "slots": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]],
    "tokens": [[5, 1, 1, 1], [2, 2, 2, 2]],
    "window": {"start": 100.0, "end": 101.0, "steps": 4, "tokens": 8},
    "balance": {"mean": 0.9, "worst": 0.8, "per_layer": [1.0, 0.8]},
    "mode": "manual",
    "run": None,
    "last_decision": None,
    "rebalances": 0,
    "failures": 0,
    "bytes_moved": 0,
}
RUN: dict[str, Any] = {
    "id": "run-1",
    "state": "free",
    "outcome": None,
    "error": None,
    "started": 100.0,
    "ended": None,
    "bytes_moved": 0,
    "experts_moved": 0,
    "layers_changed": 0,
    "num_stalls": 0,
    "stall_s": 0.0,
    "longest_stall_s": 0.0,
    "silence_s": None,
}
EXPERT_TOKENS = [[[3, 1, 0, 0], [1, 1, 1, 1]], [[2, 0, 1, 1], [1, 1, 1, 1]]]


def operation_object(kind: str, *, state: str = "succeeded", number: int = 1, **result: Any) -> dict[str, Any]:
    """An operation as the engine describes it."""
    return {
        "id": f"op-{number}",
        "kind": kind,
        "state": state,
        "error": None,
        "result": [{"rank": 0, **result}] if state == "succeeded" else None,
        "started": 100.0,
        "ended": None if state == "running" else 101.5,
        "deadline": 700.0,
        "trace_id": None,
    }


@dataclass
class FakeControl:
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)  # the fields of the result, by operation
    errors: dict[str, RequestError] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    async def __call__(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        msgspec.msgpack.encode(arguments)  # what cannot travel fails here as it would on the way to an engine
        self.calls.append((operation, arguments))
        if operation in self.errors:
            raise self.errors[operation]
        if operation == "status":
            return {**STATUS, **self.replies.get("status", {})}
        if operation == "experts":
            return {**EXPERTS, **self.replies.get("experts", {})}
        if operation == "expert_tokens":
            return {"tokens": EXPERT_TOKENS}
        if operation == "operations":
            return self._find(arguments.get("id"))
        if operation == "cancel":
            found = self._find(arguments["id"])["operations"][0]
            found.update(state="cancelled", ended=101.5)
            return dict(found)
        number = len(self.operations) + 1
        is_running = arguments.get("wait") is False
        if not is_running:
            await self.gate.wait()
        state = "running" if is_running else "succeeded"
        reply = operation_object(operation, state=state, number=number, **self.replies.get(operation, {}))
        self.operations[reply["id"]] = reply
        return reply

    def _find(self, name: str | None) -> dict[str, Any]:
        if name is None:
            return {"operations": list(reversed(self.operations.values()))}
        if name not in self.operations:
            raise NotFound(f"There is no operation {name!r}.", param="id")
        return {"operations": [self.operations[name]]}

    @property
    def last(self) -> tuple[str, dict[str, Any]]:
        return self.calls[-1]
