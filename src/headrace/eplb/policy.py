"""Whether to move experts now: what a new map would gain over a while, against what moving costs.

The engine asks each time that it `takes_turn`, moves what the answer says, and tells `record_move`. Nothing here moves
anything or knows a clock; every answer is a `Decision`, which is logged and shown, whatever it says.

Shapes: L layers, E logical experts, R ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.eplb.layout import ExpertMap
from headrace.eplb.moves import Move, busiest_rank, fetches, moves
from headrace.eplb.placement import Cluster, Strategy
from headrace.eplb.relabel import DEFAULT_SLACK, replan
from headrace.eplb.stats import Balance, WindowLoad, balance, rank_loads, summarise
from headrace.errors import ConfigError

Floats = NDArray[np.float64]


class Mode(StrEnum):
    OFF = "off"
    MANUAL = "manual"  # only when somebody asks
    AUTO = "auto"


class Action(StrEnum):
    APPLY = "apply"
    SKIP = "skip"


class Reason(StrEnum):
    """Why; `Decision.value` and `Decision.limit` are the numbers that were compared."""

    OFF = "off"
    MANUAL = "manual"
    SETTLING = "settling"  # rounds since the last move < min_rounds_between_moves
    COOLING_DOWN = "cooling_down"  # seconds since the last move < cool_down_s
    TOO_FEW_TOKENS = "too_few_tokens"  # tokens of the window < min_tokens
    BALANCED = "balanced"  # mean balance >= balance_threshold
    SMALL_GAIN = "small_gain"  # share of the fullest ranks' load that would go < min_gain
    TOO_COSTLY = "too_costly"  # seconds gained < margin x seconds that moving costs
    NOTHING_MOVES = "nothing_moves"  # somebody asked, but no slot would change
    GAIN = "gain"  # apply: seconds gained >= margin x seconds that moving costs
    REQUESTED = "requested"  # apply: somebody asked


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one round."""

    time: float
    round: int
    action: Action
    reason: Reason
    value: float = 0.0
    limit: float = 0.0
    balance_now: Balance | None = None  # of the window, under the map in force
    balance_predicted: Balance | None = None  # of the predicted load, under the new map
    bytes_to_move: int = 0  # between ranks; copies within a rank are free
    gain_s: float = 0.0  # over the horizon
    cost_s: float = 0.0
    moved_per_layer: list[int] = []  # slots that change

    def describe(self) -> str:
        """One line for the log."""
        text = f"experts: {self.action} ({self.reason}: {self.value:.4g}, limit {self.limit:.4g})"
        if self.balance_now is not None:
            text += f", balance {self.balance_now.mean:.3f} (worst layer {self.balance_now.worst:.3f})"
        if self.balance_predicted is not None:
            num_layers = sum(count > 0 for count in self.moved_per_layer)
            text += (
                f", predicted {self.balance_predicted.mean:.3f}; {sum(self.moved_per_layer)} slots of {num_layers} "
                f"layers, {self.bytes_to_move / 1e9:.4g} GB, gains {self.gain_s:.3g} s, costs {self.cost_s:.3g} s"
            )
        return text


@dataclass(frozen=True, kw_only=True)
class Settings:
    """When to move. Raises ConfigError for a value out of range."""

    mode: Mode = Mode.AUTO
    strategy: Strategy = Strategy.HIERARCHICAL
    interval_steps: int = 3000
    min_tokens: int = 20_000  # fewer say little about the next window
    balance_threshold: float = 0.9  # mean over layers; from here on it is good enough
    min_gain: float = 0.03  # share of the fullest ranks' load, over all layers
    min_layer_gain: float = 0.03  # the same of one layer; a layer that gains less keeps its map
    horizon_s: float = 600.0  # how long a new map is expected to fit
    margin: float = 2.0  # a gain must be so many times its cost
    min_rounds_between_moves: int = 2
    cool_down_s: float = 60.0
    slack: float = DEFAULT_SLACK  # of a rank's mean load, that it may carry more so that less has to move
    smoothing: float = 0.5  # weight of the newest window in the moving average

    def __post_init__(self) -> None:
        for name, least, most in (
            ("interval_steps", 1, math.inf),
            ("min_tokens", 0, math.inf),
            ("balance_threshold", 0, 1),
            ("min_gain", 0, 1),
            ("min_layer_gain", 0, 1),
            ("horizon_s", 0, math.inf),
            ("margin", 1, math.inf),
            ("min_rounds_between_moves", 0, math.inf),
            ("cool_down_s", 0, math.inf),
            ("slack", 0, 1),
            ("smoothing", 0.01, 1),
        ):
            _check_range(name, getattr(self, name), least, most)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What moving costs and balance is worth, on this machine. Raises ConfigError for a value out of range."""

    bytes_per_expert: int  # of one layer, all tensors
    bandwidth: float = 10e9  # bytes per second that a rank sends, and at the same time receives
    layer_s: float = 0.001  # on top for each layer that changes: what its switch takes
    expert_share: float = 0.5  # share of a step's time that is spent in experts
    token_s: float | None = None
    """Seconds that a rank takes for one token in one expert. Where it is known, it is used in place of `expert_share`:
    the gain then follows how busy the engine was, not only how uneven."""

    def __post_init__(self) -> None:
        _check_range("bytes_per_expert", self.bytes_per_expert, 0, math.inf)
        _check_range("bandwidth", self.bandwidth, 1, math.inf)
        _check_range("layer_s", self.layer_s, 0, math.inf)
        _check_range("expert_share", self.expert_share, 0, 1)
        _check_range("token_s", self.token_s or 0.0, 0, math.inf)


@dataclass(frozen=True)
class Proposal:
    """A decision, with the map to move to if it is to apply one."""

    decision: Decision
    target: ExpertMap | None = None
    moves: tuple[Move, ...] = ()


class MovingLoad:
    """Predicts the next window: a moving average of each expert's share of its layer."""

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing
        self._share_LE: Floats | None = None

    def update(self, tokens_LE: NDArray[np.int64]) -> Floats:
        """Takes a window in and returns the prediction in its tokens; a layer without any keeps its average."""
        total_L1 = tokens_LE.sum(axis=1, keepdims=True)
        share_LE = tokens_LE / np.maximum(total_L1, 1)
        if self._share_LE is None or self._share_LE.shape != share_LE.shape:
            self._share_LE = share_LE
        else:
            known_L1 = self._share_LE.any(axis=1, keepdims=True)
            weight_L1 = np.where(total_L1 == 0, 0.0, np.where(known_L1, self._smoothing, 1.0))
            self._share_LE = weight_L1 * share_LE + (1 - weight_L1) * self._share_LE
        predicted_LE: Floats = self._share_LE * total_L1
        return predicted_LE


class Policy:
    """Decides round by round. One thread at a time."""

    def __init__(self, settings: Settings, cluster: Cluster, costs: Costs) -> None:
        self.settings = settings
        self._cluster = cluster
        self._costs = costs
        self._average = MovingLoad(settings.smoothing)
        self._round = 0
        self._next_step = max(settings.interval_steps // 4, 1)
        self._moved_at: float | None = None
        self._rounds_since_move = 0  # of mode auto; who asks for a plan brings the next move no nearer

    def takes_turn(self, step: int) -> bool:
        """Whether a round begins at this step: once per interval, the first time after a quarter of one. Says yes once,
        however long the engine then stays at a step, and late if nobody asked in time."""
        if self.settings.mode is not Mode.AUTO or step < self._next_step:
            return False
        interval = self.settings.interval_steps
        self._next_step += (step - self._next_step) // interval * interval + interval
        return True

    def record_move(self, time: float) -> None:
        """A move has ended, well or not: the next may come after the pause that the settings ask for."""
        self._moved_at, self._rounds_since_move = time, 0

    def decide(self, window: WindowLoad, current: ExpertMap, time: float) -> Proposal:
        """One round of mode auto: `window` holds what came since the last one. In another mode nothing is applied."""
        self._round += 1
        self._rounds_since_move += 1
        settings = self.settings
        now = summarise(balance(rank_loads(window.tokens_LE, current)))
        if settings.mode is not Mode.AUTO:
            return Proposal(self._skip(time, Reason(settings.mode.value), 0.0, 0.0, now))
        if window.num_tokens < settings.min_tokens:
            return Proposal(self._skip(time, Reason.TOO_FEW_TOKENS, window.num_tokens, settings.min_tokens, now))
        predicted_LE = self._average.update(window.tokens_LE)  # also while no move is allowed
        if (refusal := self._too_soon(time)) is not None:
            return Proposal(self._skip(time, *refusal, now))
        if now.mean >= settings.balance_threshold:
            return Proposal(self._skip(time, Reason.BALANCED, now.mean, settings.balance_threshold, now))
        target = self._target(predicted_LE, current, self.settings.min_layer_gain)
        weighed = self._weigh(window, predicted_LE, current, target, time)
        return weighed if weighed.decision.action is Action.APPLY else Proposal(weighed.decision)

    def propose(self, window: WindowLoad, current: ExpertMap, time: float) -> Proposal:
        """The map that suits the window best, for somebody who asked (a dry run, or a move): no threshold applies."""
        return self.consider(window, current, self._target(window.tokens_LE.astype(np.float64), current, 0.0), time)

    def consider(self, window: WindowLoad, current: ExpertMap, target: ExpertMap, time: float) -> Proposal:
        """The same for a map that somebody brings."""
        self._round += 1
        tokens_LE = window.tokens_LE.astype(np.float64)
        weighed = self._weigh(window, tokens_LE, current, target, time)
        changes = len(weighed.moves)
        action, reason = (Action.APPLY, Reason.REQUESTED) if changes else (Action.SKIP, Reason.NOTHING_MOVES)
        decision = msgspec.structs.replace(
            weighed.decision, action=action, reason=reason, value=float(changes), limit=1.0
        )
        return Proposal(decision, target, weighed.moves) if changes else Proposal(decision)

    def _too_soon(self, time: float) -> tuple[Reason, float, float] | None:
        if self._moved_at is None:
            return None
        rounds, min_rounds = self._rounds_since_move - 1, self.settings.min_rounds_between_moves
        if rounds < min_rounds:
            return Reason.SETTLING, rounds, min_rounds
        if time - self._moved_at < self.settings.cool_down_s:
            return Reason.COOLING_DOWN, time - self._moved_at, self.settings.cool_down_s
        return None

    def _target(self, load_LE: Floats, current: ExpertMap, min_layer_gain: float) -> ExpertMap:
        """The new map; layers that would gain less than `min_layer_gain`, or nothing, stay as they are."""
        new = replan(current, load_LE, self._cluster, self.settings.strategy, self.settings.slack)
        gain_L = _layer_gains(load_LE, current, new)
        keeps_L1 = (gain_L <= 1e-9) | (gain_L < min_layer_gain)
        slots_LP = np.where(keeps_L1[:, None], current.slots_LP, new.slots_LP)
        return ExpertMap(slots_LP, current.num_experts, current.num_ranks)

    def _weigh(
        self, window: WindowLoad, predicted_LE: Floats, current: ExpertMap, target: ExpertMap, time: float
    ) -> Proposal:
        """Gain against cost. A plan looks best on the load it was made for, so the last window is asked as well."""
        to_do = moves(current, target, num_nodes=self._cluster.whole_nodes)
        by_layer = Counter(move.layer for move in to_do)
        loads = (predicted_LE, window.tokens_LE.astype(np.float64))
        gain, saved = min(_total_gain(load_LE, current, target) for load_LE in loads)
        gain_s, cost_s = self._gain_s(gain, saved, window), self._cost_s(to_do, len(by_layer))
        settings = self.settings
        applies, reason, value, limit = True, Reason.GAIN, gain_s, settings.margin * cost_s
        if not to_do or gain < settings.min_gain:
            applies, reason, value, limit = False, Reason.SMALL_GAIN, gain, settings.min_gain
        elif gain_s < limit:
            applies, reason = False, Reason.TOO_COSTLY
        decision = Decision(
            time=time,
            round=self._round,
            action=Action.APPLY if applies else Action.SKIP,
            reason=reason,
            value=value,
            limit=limit,
            balance_now=summarise(balance(rank_loads(window.tokens_LE, current))),
            balance_predicted=summarise(balance(rank_loads(predicted_LE, target))),
            bytes_to_move=len(fetches(to_do)) * self._costs.bytes_per_expert,
            gain_s=gain_s,
            cost_s=cost_s,
            moved_per_layer=[by_layer[layer] for layer in range(current.num_layers)],
        )
        return Proposal(decision, target, tuple(to_do))

    def _gain_s(self, gain: float, saved_tokens: float, window: WindowLoad) -> float:
        if self._costs.token_s is not None and window.duration_s > 0:
            return saved_tokens / window.duration_s * self._costs.token_s * self.settings.horizon_s
        return gain * self._costs.expert_share * self.settings.horizon_s

    def _cost_s(self, to_do: list[Move], num_layers: int) -> float:
        """Ranks send and receive at the same time, so the busiest one sets the pace."""
        return busiest_rank(to_do) * self._costs.bytes_per_expert / self._costs.bandwidth + (
            num_layers * self._costs.layer_s
        )

    def _skip(self, time: float, reason: Reason, value: float, limit: float, now: Balance) -> Decision:
        return Decision(
            time=time,
            round=self._round,
            action=Action.SKIP,
            reason=reason,
            value=value,
            limit=limit,
            balance_now=now,
        )


def _layer_gains(load_LE: Floats, current: ExpertMap, new: ExpertMap) -> Floats:
    """Share of the fullest rank's load that goes away, [L]: a layer waits for its fullest rank."""
    now_L, then_L = rank_loads(load_LE, current).max(axis=1), rank_loads(load_LE, new).max(axis=1)
    gain_L: Floats = np.divide(now_L - then_L, now_L, out=np.zeros_like(now_L), where=now_L > 0)
    return gain_L


def _total_gain(load_LE: Floats, current: ExpertMap, target: ExpertMap) -> tuple[float, float]:
    """(share of the fullest ranks' load over all layers that goes away, the same in tokens)."""
    now = float(rank_loads(load_LE, current).max(axis=1).sum())
    saved = now - float(rank_loads(load_LE, target).max(axis=1).sum())
    return (saved / now if now else 0.0), saved


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most or math.isinf(value):  # NaN is in no range
        limits = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
        raise ConfigError(f"{name} is {value:g}; it must be {limits}")
