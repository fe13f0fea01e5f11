"""Counters and reasons -> `EngineStatus`, the same for both clients."""

from __future__ import annotations

import msgspec

from headrace.client.base import EngineStatus
from headrace.transport.messages import EngineInfo
from headrace.transport.stats import EngineStats


def status_of(
    stats: EngineStats, info: EngineInfo | None, reasons: tuple[str, ...], heartbeat_age_s: float
) -> EngineStatus:
    return EngineStatus(
        is_ready=not reasons,
        reasons=reasons,
        heartbeat_age_s=heartbeat_age_s,
        weights_version=info.weights_version if info is not None else "0",
        **msgspec.structs.asdict(stats),
    )
