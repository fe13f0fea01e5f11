"""The engine's side of balancing experts: what is measured, which map is in force, and the run that changes it.

Belongs to the engine's thread. `engine/control/experts.py` has the operations on it; the arithmetic is in `eplb/`, the
moving in the executor. A run has an id, so that whoever speaks of one that is over is told so.

    FREE ──begin──► OPEN ──stage──► MOVING ──all here──► STAGED ──commit──► FREE
                    any of them ──abort, failure, silence──► FREE, old map
    FREE ──apply──► MOVING, a layer at a time: its weights come, then they and its row of the map change together
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from headrace.config.options import ExpertsConfig
from headrace.config.size import parse_size
from headrace.eplb import (
    Cluster,
    Costs,
    Decision,
    ExpertMap,
    LoadWindow,
    Mode,
    Policy,
    Proposal,
    Settings,
    Strategy,
    WindowLoad,
    balance,
    initial_map,
    rank_loads,
    summarise,
)
from headrace.errors import Conflict
from headrace.executor.base import Executor, ExpertMover

logger = logging.getLogger(__name__)

_BANDWIDTH = 1e9  # bytes of the busiest rank per second that the steps lose by moving them: 1 to 3% for 12 MB in 0.6 s
_COUNT_STEPS = 8
"""Steps after which counts are taken at the latest: a look at 48 layers of 128 experts costs 0.3 ms."""


class RunState(StrEnum):
    FREE = "free"
    OPEN = "open"  # taken by somebody who still gathers loads for it
    MOVING = "moving"
    STAGED = "staged"


@dataclass
class Run:
    """One change of the map."""

    id: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:16]}")
    state: RunState = RunState.MOVING
    target: ExpertMap | None = None
    started: float = field(default_factory=time.time)
    ended: float | None = None
    outcome: str | None = None  # committed, aborted or failed
    error: str | None = None
    num_bytes: int = 0
    num_experts: int = 0
    layers_changed: int = 0
    num_stalls: int = 0  # times that no step could run
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    open_stall_s: float = 0.0  # of the one that is not over
    silence_s: float | None = None  # open or staged, it is given up when so long nobody has spoken of it
    heard_s: float = 0.0

    def end_stall(self) -> None:
        """A step may come."""
        if self.open_stall_s:
            self.num_stalls += 1
            self.stall_s += self.open_stall_s
            self.longest_stall_s = max(self.longest_stall_s, self.open_stall_s)
            self.open_stall_s = 0.0

    def as_object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": str(self.state),
            "outcome": self.outcome,
            "error": self.error,
            "started": self.started,
            "ended": self.ended,
            "bytes_moved": self.num_bytes,
            "experts_moved": self.num_experts,
            "layers_changed": self.layers_changed,
            "num_stalls": self.num_stalls,
            "stall_s": round(self.stall_s, 6),
            "longest_stall_s": round(self.longest_stall_s, 6),
            "silence_s": self.silence_s,
        }


@dataclass
class BalancerCounts:
    """Totals since the start, for metrics."""

    num_rebalances: int = 0
    num_failures: int = 0
    num_bytes: int = 0


class ExpertBalancer:
    """For a model with experts, on however many ranks; on one it only measures."""

    def __init__(
        self,
        executor: Executor,
        config: ExpertsConfig,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` makes the engine's loop take another turn, also when there is nothing to compute."""
        self._wake = wake
        self._executor = executor
        self._config = config
        self._clock = clock
        current = executor.expert_map
        self.first_map = current  # of the start
        self._num_layers = len(executor.expert_layers)
        counts_LP = executor.take_expert_counts()
        assert counts_LP is not None, "made for a model with experts"
        self.num_experts = counts_LP.shape[1] if current is None else current.num_experts
        shape = (self._num_layers, self.num_experts)
        self.window = LoadWindow(*shape, config.expert_window_steps)
        self._since_round = LoadWindow(*shape, config.expert_interval_steps)  # what the policy decides from
        self.counts = BalancerCounts()
        self.run: Run | None = None  # the last one, over or not
        self.last_decision: Decision | None = None
        self.pinned = False
        self._tokens_RLE = np.zeros((self.current.num_ranks, self._num_layers, self.num_experts), np.int64)
        self._seen_step = self._counted_step = 0
        least = min(config.expert_window_steps, config.expert_interval_steps)
        self._count_steps = min(_COUNT_STEPS, max(1, least // 10))
        self._policy = self._make_policy() if current is not None else None

    def _make_policy(self) -> Policy:
        config, mover = self._config, self._executor.expert_moves
        assert self._executor.expert_map is not None, "asked where experts are spread"
        settings = Settings(
            mode=Mode(config.expert_balancing),
            strategy=Strategy(config.expert_strategy),
            interval_steps=config.expert_interval_steps,
            min_tokens=config.expert_min_tokens,
            balance_threshold=config.expert_balance_threshold,
            min_gain=config.expert_min_gain,
            horizon_s=config.expert_horizon,
            cool_down_s=config.expert_cool_down,
        )
        num_bytes = 0 if mover is None else mover.bytes_per_expert
        num_groups = self.num_experts if config.expert_nodes > 1 else None  # each expert may go to any node
        cluster = Cluster(
            num_ranks=self._executor.expert_map.num_ranks, num_nodes=config.expert_nodes, num_groups=num_groups
        )
        return Policy(settings, cluster, Costs(bytes_per_expert=num_bytes, bandwidth=_BANDWIDTH))

    # ------------------------------------------------------------------------------------------------------- measuring

    @property
    def current(self) -> ExpertMap:
        """The map in force; where experts are not spread, every one lies on the only rank, or in part on all."""
        return self._executor.expert_map or initial_map(self._num_layers, self.num_experts, 0, 1)

    def observe(self, step: int) -> None:
        """Called between any two steps. Cheap: counts are taken every few steps alone."""
        self._seen_step = step
        if step - self._counted_step >= self._count_steps:
            self.count()

    def count(self) -> None:
        """Takes what the steps so far have sent to each expert: before loads are read, and before the map or the
        weights change."""
        num_steps, self._counted_step = self._seen_step - self._counted_step, self._seen_step
        counts_LP = self._executor.take_expert_counts() if num_steps else None
        if counts_LP is None:
            return
        counts_RLE = self._by_rank(counts_LP)
        self._tokens_RLE += counts_RLE
        counts_LE, now = counts_RLE.sum(axis=0), time.time()
        self.window.add(counts_LE, now, num_steps)
        self._since_round.add(counts_LE, now, num_steps)

    def _by_rank(self, counts_LP: np.ndarray) -> np.ndarray:
        """[R, L, E], under the map that they were counted under."""
        current = self.current
        num_ranks, num_layers, num_experts = shape = self._tokens_RLE.shape
        layers_L1, ranks_P = np.arange(num_layers)[:, None], np.arange(current.num_slots) // current.slots_per_rank
        cells_LP = (ranks_P * num_layers + layers_L1) * num_experts + current.slots_LP
        sums = np.bincount(cells_LP.ravel(), counts_LP.ravel(), num_ranks * num_layers * num_experts)
        return sums.astype(np.int64).reshape(shape)  # exact: float64 holds whole numbers up to 2^53

    def tokens_by_rank(self, *, clear: bool = False) -> np.ndarray:
        """What each rank's slots were given, by logical expert, since it was last cleared: int64 [R, L, E]."""
        self.count()
        taken = self._tokens_RLE
        if clear:
            self._tokens_RLE = np.zeros_like(taken)
        return taken

    def balance_now(self) -> tuple[float, float]:
        """Mean and worst over layers, of the window."""
        self.count()
        summary = summarise(balance(rank_loads(self.window.read().tokens_LE, self.current)))
        return summary.mean, summary.worst

    # -------------------------------------------------------------------------------------------------------- deciding

    def takes_turn(self) -> bool:
        """Whether the policy decides now. Says yes once per round."""
        if self._policy is None or self.pinned or not self.is_free or not self._policy.takes_turn(self._seen_step):
            return False
        self.count()
        return True

    def decide(self) -> Proposal:
        """A round of the policy, in any thread: it sees what came since the last one."""
        assert self._policy is not None, "asked where experts are spread"
        return self._policy.decide(self._since_round.read(clear=True), self.current, time.time())

    def propose(self, tokens_LE: np.ndarray | None = None, target: ExpertMap | None = None) -> Proposal:
        """The best map for given loads, or the window's; or what a given map would do. Any thread."""
        assert self._policy is not None, "asked where experts are spread"
        window = self.window.read()
        if tokens_LE is not None:
            window = WindowLoad(tokens_LE.astype(np.int64), window.num_steps, window.start, window.end)
        if target is not None:
            return self._policy.consider(window, self.current, target, time.time())
        return self._policy.propose(window, self.current, time.time())

    def note(self, decision: Decision) -> None:
        self.last_decision = decision
        logger.info("%s", decision.describe())

    # ---------------------------------------------------------------------------------------------------------- moving

    @property
    def is_free(self) -> bool:
        return self.run is None or self.run.state is RunState.FREE

    @property
    def mover(self) -> ExpertMover:
        """Raises Conflict where there is nothing to move."""
        mover = self._executor.expert_moves
        if mover is None:
            raise Conflict(
                "Whole experts are not spread over ranks here: --tensor-parallel-size above 1 with"
                " --enable-expert-parallel does that, for a model with experts.",
                code="not_expert_parallel",
            )
        return mover

    def open_run(self, run_id: str | None = None, state: RunState = RunState.MOVING) -> Run:
        """A new one, or that which was begun under this id. Raises Conflict while another is not over."""
        run = self.run
        if run is not None and not self.is_free:
            if not self.is_begun(run_id):
                raise Conflict(f"{run.id} is {run.state}: commit or abort it first.", code="rebalance_open")
        else:
            self.run = run = Run() if run_id is None else Run(id=run_id)
        run.state, run.heard_s = state, self._clock()
        return run

    def is_begun(self, run_id: str | None) -> bool:
        return self.run is not None and self.run.state is RunState.OPEN and self.run.id == run_id

    def hear(self, run_id: str) -> None:
        """Somebody speaks of a run, and so has not gone."""
        if self.run is not None and self.run.id == run_id:
            self.run.heard_s = self._clock()

    def expire(self) -> None:
        """Gives up a run whose leader has gone silent."""
        run = self.run
        if run is None or run.silence_s is None or run.state not in (RunState.OPEN, RunState.STAGED):
            return
        if self._clock() - run.heard_s > run.silence_s:
            logger.error("experts: %s was given up: nothing was heard of it for %g s", run.id, run.silence_s)
            self.end(run, "aborted", f"nothing was heard of it for {run.silence_s:g} s")

    def the_run(self, run_id: str | None, *states: RunState) -> Run:
        """The run that is under way, if it is the one meant and in one of these states. Raises Conflict."""
        run = self.run
        if run is None or (run_id is not None and run_id != run.id):
            raise Conflict(f"There is no run {run_id or ''} of the balancer.".replace("  ", " "), code="stale_run")
        if run.state not in states:
            raise Conflict(f"{run.id} is {run.state}, not {' or '.join(states)}.", code="wrong_state")
        return run

    def changed(self, target: ExpertMap) -> list[int]:
        """The rows in which a map differs from the one in force."""
        rows: list[int] = np.flatnonzero((target.slots_LP != self.current.slots_LP).any(axis=1)).tolist()
        return rows

    def move(self, run: Run, target: ExpertMap, rows: list[int]) -> Generator[None, None, None]:
        """Brings all weights that rows of a map need to where they need them, beside the steps: some bytes in each."""
        started_s, mover = self._clock(), self.mover
        mover.open(target, rows)
        has_more = True
        while has_more:
            copying = mover.copy(self._bytes_per_step)
            run.open_stall_s += self._clock() - started_s
            run.end_stall()
            copying.add_done_callback(lambda _: self._wake())
            yield  # at least one step for so many bytes
            while not copying.done():
                yield
            has_more, started_s = copying.result(), self._clock()
        run.num_bytes += mover.num_bytes
        run.num_experts += mover.num_experts

    def place(self, run: Run, rows: list[int]) -> None:
        """The next step runs with the rows whose weights were moved."""
        started_s = self._clock()
        self.count()  # under the map that goes
        self.mover.place()
        run.layers_changed += len(rows)
        run.open_stall_s += self._clock() - started_s

    def remap(self, run: Run, target: ExpertMap) -> None:
        """The weights that come next, after sleep say, lie as this map wants it: from disk, or from their sender."""
        run.layers_changed += len(self.changed(target))
        self.mover.remap(target)

    def end(self, run: Run, outcome: str, error: str | None = None) -> None:
        """The run is over; whatever was moved and not placed is forgotten."""
        mover = self._executor.expert_moves
        if mover is not None:
            mover.drop()
        run.end_stall()
        run.state, run.outcome, run.error, run.ended, run.target = RunState.FREE, outcome, error, time.time(), None
        self.counts.num_bytes += run.num_bytes
        if outcome == "committed":
            self.counts.num_rebalances += 1
        elif outcome == "failed":
            self.counts.num_failures += 1
            logger.error("experts: %s failed: %s; the map that was in force stays", run.id, error)
        if self._policy is not None and outcome != "aborted":
            self._policy.record_move(time.time())

    def forget_staged(self, reason: str) -> None:
        """Other weights are coming, or none: what was staged belongs to the old ones."""
        self.count()
        if self.run is not None and self.run.state is RunState.STAGED:
            self.end(self.run, "aborted", reason)

    @property
    def _bytes_per_step(self) -> int:
        return max(4096, parse_size(self._config.expert_move_bytes))

    # --------------------------------------------------------------------------------------------------------- showing

    @property
    def report_mode(self) -> str:
        return "pinned" if self.pinned else self._config.expert_balancing

    def report(self, *, clear: bool = False) -> dict[str, Any]:
        """What GET /v1/experts says."""
        self.count()
        current, load = self.current, self.window.read(clear)
        summary = summarise(balance(rank_loads(load.tokens_LE, current)))
        run, decision = self.run, self.last_decision
        return {
            "num_layers": current.num_layers,
            "layers": list(self._executor.expert_layers),
            "num_experts": self.num_experts,
            "num_slots": current.num_slots,
            "num_ranks": current.num_ranks,
            "is_expert_parallel": self._executor.expert_map is not None,
            "slots": current.slots_LP.tolist(),
            "tokens": load.tokens_LE.tolist(),
            "window": {"start": load.start, "end": load.end, "steps": load.num_steps, "tokens": load.num_tokens},
            "balance": msgspec.to_builtins(summary),
            "mode": self.report_mode,
            "run": None if run is None else run.as_object(),
            "last_decision": None if decision is None else msgspec.to_builtins(decision),
            "rebalances": self.counts.num_rebalances,
            "failures": self.counts.num_failures,
            "bytes_moved": self.counts.num_bytes,
        }
