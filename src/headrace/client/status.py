"""Counters and reasons -> `EngineStatus`, the same for both clients."""

from __future__ import annotations

import msgspec

from headrace.client.base import EngineStatus
from headrace.transport.messages import Lifecycle
from headrace.transport.stats import EngineStats


def status_of(
    stats: EngineStats, lifecycle: Lifecycle, reasons: tuple[str, ...], heartbeat_age_s: float
) -> EngineStatus:
    reasons = (*reasons, *lifecycle_reasons(lifecycle))
    return EngineStatus(
        is_ready=not reasons,
        reasons=reasons,
        heartbeat_age_s=heartbeat_age_s,
        weights_state=lifecycle.state,
        weights_reason=lifecycle.reason,
        asleep=lifecycle.asleep,
        is_paused=lifecycle.is_paused,
        weights_version=lifecycle.version,
        weights_epoch=lifecycle.epoch,
        **msgspec.structs.asdict(stats),
    )


def lifecycle_reasons(lifecycle: Lifecycle) -> tuple[str, ...]:
    """Why the weights and the memory cannot serve. A paused engine is ready: what comes waits for its trainer."""
    return {"asleep": ("asleep",), "updating": ("updating",), "poisoned": ("weights_poisoned",)}.get(
        lifecycle.state, ()
    )
