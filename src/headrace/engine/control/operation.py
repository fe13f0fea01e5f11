"""One control operation: what was asked, how it stands, what came of it."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from headrace.errors import ErrorInfo, RequestError


class Cancelled(RequestError):
    """Somebody cancelled the operation."""

    status, type, default_code = 409, "conflict_error", "cancelled"


class Operation(msgspec.Struct, kw_only=True):
    """Kept after its end, for whoever asks later. Times are unix times."""

    kind: str
    id: str = msgspec.field(default_factory=lambda: f"op-{uuid.uuid4().hex}")
    state: str = "running"  # running, succeeded, failed or cancelled
    error: ErrorInfo | None = None
    result: list[dict[str, Any]] = msgspec.field(default_factory=list)  # per rank
    started: float = msgspec.field(default_factory=time.time)
    ended: float | None = None
    deadline: float | None = None
    trace_id: str | None = None  # of the trace that asked for it

    @property
    def is_running(self) -> bool:
        return self.ended is None

    def end(self, state: str, result: dict[str, Any] | None = None, error: ErrorInfo | None = None) -> None:
        self.state = state
        self.result = [] if result is None else [{"rank": 0, **result}]
        self.error = error
        self.ended = time.time()

    def brief(self) -> dict[str, Any]:
        return {"id": self.id, "kind": self.kind, "started": self.started}

    def as_object(self) -> dict[str, Any]:
        """The operation object of the HTTP interface."""
        error = self.error
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "error": None
            if error is None
            else {"message": error.message, "type": error.type, "param": error.param, "code": error.code},
            "result": self.result,
            "started": self.started,
            "ended": self.ended,
            "deadline": self.deadline,
            "trace_id": self.trace_id,
        }
