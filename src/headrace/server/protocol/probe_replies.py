"""Replies of the probes, for OpenAPI."""

from __future__ import annotations

import msgspec


class RankHealth(msgspec.Struct):
    """A process that the model is spread over; 0 is the engine."""

    rank: int
    pid: int
    heartbeat_age_s: float
    num_steps: int


class Readiness(msgspec.Struct):
    """`reasons` are words such as starting, draining, engine_dead, engine_stalled, rank_1_stalled."""

    status: str
    reasons: list[str]
    ranks: list[RankHealth] | msgspec.UnsetType = msgspec.UNSET  # where there are several


class VersionReply(msgspec.Struct):
    version: str
