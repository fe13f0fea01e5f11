"""Counters and reasons -> `EngineStatus`, the same for both clients."""

from __future__ import annotations

import msgspec

from headrace.client.base import EngineStatus, RankStatus
from headrace.transport.messages import Lifecycle
from headrace.transport.stats import EngineStats


def status_of(
    stats: EngineStats,
    lifecycle: Lifecycle,
    reasons: tuple[str, ...],
    heartbeat_age_s: float,
    ranks: tuple[RankStatus, ...] = (),
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
        ranks=ranks,
        **msgspec.structs.asdict(stats),
    )


def lifecycle_reasons(lifecycle: Lifecycle) -> tuple[str, ...]:
    """Why new requests are not served. A paused engine is ready: what comes waits for its trainer."""
    states = {"asleep": ("asleep",), "updating": ("updating",), "poisoned": ("weights_poisoned",)}
    return (*states.get(lifecycle.state, ()), *(("draining",) if lifecycle.is_draining else ()))
