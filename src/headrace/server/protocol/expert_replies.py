"""The reply of GET /v1/experts, for OpenAPI. Rows are the layers that have experts; times are unix times."""

from __future__ import annotations

import msgspec


class ExpertWindow(msgspec.Struct):
    """What `tokens` were counted over; `tokens` here is their sum in one layer."""

    start: float | None
    end: float | None
    steps: int
    tokens: int


class ExpertBalance(msgspec.Struct):
    """Mean over ranks / most of any rank; 1 is even."""

    mean: float
    worst: float
    per_layer: list[float]


class ExpertRun(msgspec.Struct):
    """The last change of the map. `state` is open, moving, staged or free, which is its end; `outcome` is then
    committed, aborted or failed."""

    id: str
    state: str
    outcome: str | None
    error: str | None
    started: float
    ended: float | None
    bytes_moved: int
    experts_moved: int
    layers_changed: int
    num_stalls: int
    stall_s: float
    longest_stall_s: float
    silence_s: float | None


class ExpertDecision(msgspec.Struct):
    """The last round of the policy, or plan: `action` apply or skip, for a `reason` whose numbers are `value` and
    `limit`."""

    time: float
    round: int
    action: str
    reason: str
    value: float
    limit: float
    balance_now: ExpertBalance | None
    balance_predicted: ExpertBalance | None
    bytes_to_move: int
    gain_s: float
    cost_s: float
    moved_per_layer: list[int]


class Experts(msgspec.Struct):
    """Loads, map and balance. Slot s of a layer is on rank s // (num_slots / num_ranks); `slots` holds experts' ids."""

    num_layers: int
    layers: list[int]
    num_experts: int
    num_slots: int
    num_ranks: int
    is_expert_parallel: bool
    slots: list[list[int]]
    tokens: list[list[int]]
    window: ExpertWindow
    balance: ExpertBalance
    mode: str
    run: ExpertRun | None
    last_decision: ExpertDecision | None
    rebalances: int
    failures: int
    bytes_moved: int
