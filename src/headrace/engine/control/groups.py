"""Process groups with a trainer: joined and left by name, off the step loop."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.engine.control.state import EngineState, Steps
from headrace.errors import Conflict
from headrace.weights.incoming.process_group import TransferGroup

DEFAULT_JOIN_S = 300.0


class JoinArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "gloo"
    timeout_s: float | None = None


class LeaveArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group_name: str = "weight_update_group"


def join_group(state: EngineState, arguments: JoinArguments) -> Steps[dict[str, Any]]:
    """Blocks until all members have met, or the time is over."""
    name = arguments.group_name
    known = state.groups.get(name)
    if known is not None and known.is_open:
        raise Conflict(f"The group {name[:80]!r} is joined already: leave_group comes first.", code="group_joined")
    group = TransferGroup(
        host=arguments.host,
        port=arguments.port,
        rank=arguments.rank_offset,
        world_size=arguments.world_size,
        group_name=name,
        backend=arguments.backend,
        timeout_s=arguments.timeout_s or DEFAULT_JOIN_S,
    )
    try:
        yield from state.background(group.join)
    except BaseException:
        group.abort()
        raise
    state.groups[name] = group
    return {"group_name": name}


def leave_group(state: EngineState, arguments: LeaveArguments) -> Steps[dict[str, Any]]:
    """One that was never joined, or has failed, is no error: trainers leave in any state."""
    group = state.groups.pop(arguments.group_name, None)
    if group is not None:
        yield from state.background(group.close)
    return {"was_joined": group is not None}
