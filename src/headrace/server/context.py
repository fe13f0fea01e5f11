"""What every route needs, made once per front end by `app.py` and found through `context_of(request)`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import HTTPConnection

from headrace.client.base import EngineClient
from headrace.client.lifecycle import Lifecycle
from headrace.config.options import ServeConfig
from headrace.errors import Draining, NotFound
from headrace.observability.logs import set_level
from headrace.observability.prometheus import Metrics
from headrace.processing.checks import shown
from headrace.processing.inputs import InputProcessor
from headrace.processing.parsing import Parsing
from headrace.processing.tokenizer import Tokenizer
from headrace.server.response_store import ResponseStore

if TYPE_CHECKING:
    from headrace.observability.otel import Trace, Tracer
    from headrace.server.keys import KeyRing


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerContext:
    client: EngineClient
    tokenizer: Tokenizer
    config: ServeConfig
    served_names: tuple[str, ...]
    lifecycle: Lifecycle | None
    inputs: InputProcessor
    parsing: Parsing
    keys: KeyRing
    metrics: Metrics
    sampling_defaults: Mapping[str, Any]
    runtime_dir: Path | None = None  # the server's private directory; none in tests
    set_log_level: Callable[[int], None] = set_level  # of the whole server; of this process alone in tests
    tracer: Tracer | None = None
    trace: Trace | None = None  # of the request that this context was made for, if it is sampled
    trace_parent: str | None = None  # of that trace, else the caller's
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # that go on after the reply; they end with the server
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """The name that the reply carries. Raises NotFound for a model that is not served here."""
        if asked is None or asked == "default":  # FastDeploy's word for whatever is served
            return self.served_names[0]
        if asked not in self.served_names:
            served = ", ".join(self.served_names)
            raise NotFound(
                f"The model {shown(asked)} is not served here; served: {served}.", param="model", code="model_not_found"
            )
        return asked

    def refuse_when_draining(self) -> None:
        if self.lifecycle is not None and self.lifecycle.is_draining:
            raise Draining

    def reasons(self) -> tuple[str, ...]:
        """Why this server is not ready, as machine-readable words; empty when it is."""
        status = self.client.status()
        reasons = list(status.reasons)
        if status.heartbeat_age_s > self.config.server.heartbeat_timeout:
            reasons.append("engine_stalled")
        for rank in status.ranks:
            if rank.rank and rank.heartbeat_age_s > self.config.server.heartbeat_timeout:
                reasons.append(f"rank_{rank.rank}_stalled")
        if self.lifecycle is not None:
            reasons.extend(self.lifecycle.reasons())
        if not status.is_ready and not reasons:
            reasons.append("not_ready")
        return tuple(dict.fromkeys(reasons))


def context_of(connection: HTTPConnection) -> ServerContext:
    """The front end's; a request that belongs to a trace has its own copy, which says so."""
    own = connection.scope["state"].get("context")
    return cast(ServerContext, own or connection.app.state.context)


def request_state(connection: HTTPConnection) -> dict[str, Any]:
    """What the middleware keeps of one request: request_id, headers for the reply, fields for its log line."""
    return cast(dict[str, Any], connection.scope["state"])
