"""The operations by name: their arguments, and what runs. Those on weights stand in refresh.py and inspect.py."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.engine.control import experts, groups, inspect, refresh
from headrace.engine.control.state import TAGS, EngineState, PauseMode, Steps, Tag, resident_bytes
from headrace.errors import Conflict, DeadlineExceeded, RequestError
from headrace.weights.checkpoint import fingerprint

AUTOMATIC = "balance_experts"
"""The one that the engine starts itself, when its policy is due. It gives way to any other."""
Result = dict[str, Any]
Run = Callable[[EngineState, Any], Generator[None, None, Result] | Result]


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


class PauseArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: PauseMode = "abort"
    clear_cache: bool = False  # forget cached prefixes
    recompute: bool = False  # what is frozen gives its KV up and computes it again later
    timeout_s: float | None = None


class DrainArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_s: float | None = None


class SleepArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tags: list[Tag] | None = None  # None: all
    mode: PauseMode = "abort"
    timeout_s: float | None = None


class WakeArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tags: list[Tag] | None = None  # None: all that sleep


def pause(state: EngineState, arguments: PauseArguments) -> Steps[Result]:
    """abort ends what is alive with what it has, wait lets it end, keep freezes it. Requests that come are held."""
    num_aborted = yield from state.settle(arguments.mode)
    state.change(pause_mode=arguments.mode)
    if arguments.recompute:
        state.core.drop_kv()
    elif arguments.clear_cache:
        state.core.reset_prefix_cache()
    return {"aborted": num_aborted}


def resume(state: EngineState, arguments: Arguments) -> Result:
    was_paused = state.lifecycle.is_paused
    state.change(pause_mode=None)
    return {"was_paused": was_paused}


def drain(state: EngineState, arguments: DrainArguments) -> Steps[Result]:
    """Refuses requests from now on, and ends when those that are there have ended. Past the deadline the refusal stays:
    whoever drains is about to take the server away."""
    num_live = state.core.num_live
    if num_live and not state.lifecycle.is_serving:
        raise Conflict(f"{num_live} choices wait or are frozen and cannot end: resume, or abort them.")
    state.change(is_draining=True)
    try:
        while state.core.num_live:
            yield
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error.message}: {state.left()}; new ones are refused until an undrain") from None
    except RequestError:  # cancelled
        state.change(is_draining=False)
        raise
    return {"num_awaited": num_live}


def undrain(state: EngineState, arguments: Arguments) -> Result:
    was_draining = state.lifecycle.is_draining
    state.change(is_draining=False)
    return {"was_draining": was_draining}


def sleep(state: EngineState, arguments: SleepArguments) -> Steps[Result]:
    """Gives memory back. What was frozen (keep) computes its tokens anew when its KV was given up."""
    tags = [tag for tag in arguments.tags or TAGS if tag not in state.lifecycle.asleep]
    if not tags:
        return {"freed_bytes": 0, "tags": list(state.lifecycle.asleep)}
    if state.refresh is not None:
        raise Conflict("A refresh is open: commit or abort it before the engine sleeps.", code="refresh_open")
    state.forget_staged_experts("the engine went to sleep")
    yield from state.settle(arguments.mode)
    before = resident_bytes()
    if "kv_cache" in tags:
        state.core.drop_kv()
        state.executor.free_kv()
    if "weights" in tags:
        state.executor.drop_weights()
    asleep = tuple(tag for tag in TAGS if tag in tags or tag in state.lifecycle.asleep)
    is_poisoned = state.lifecycle.state == "poisoned"
    state.change(state="poisoned" if is_poisoned else "asleep", asleep=asleep)
    return {"freed_bytes": max(0, before - resident_bytes()), "tags": list(asleep)}


def wake(state: EngineState, arguments: WakeArguments) -> Steps[Result]:
    """KV memory comes back empty, weights from where they were read last."""
    tags = [tag for tag in arguments.tags or TAGS if tag in state.lifecycle.asleep]
    if "kv_cache" in tags:
        state.executor.restore_kv()
        asleep = tuple(tag for tag in state.lifecycle.asleep if tag != "kv_cache")
        is_ready = state.lifecycle.state == "asleep" and not asleep
        state.change(asleep=asleep, state="ready" if is_ready else state.lifecycle.state)
    if "weights" in tags:
        if state.refresh is not None:
            raise Conflict("A refresh is open: its commit wakes the weights.", code="refresh_open")
        yield from _wake_weights(state)
    return {"tags": tags, "state": state.lifecycle.state, "reason": state.lifecycle.reason}


def _wake_weights(state: EngineState) -> Steps[None]:
    path, asleep = state.path, tuple(tag for tag in state.lifecycle.asleep if tag != "weights")
    if path is None:
        state.poison("the weights were given back in sleep, and did not come from a file", asleep=asleep)
        return
    if fingerprint(path) != state.mark:
        state.poison(f"the files of {path} have changed since they were read", asleep=asleep)
        return
    stage = state.executor.open_stage(is_delta=False)

    def read() -> None:
        stage.add_path(path)
        state.executor.finish(stage)

    try:
        yield from state.background(read)
    except BaseException:
        state.executor.close_stage(stage)
        raise
    state.executor.swap(stage)
    state.core.adopt_weights(state.lifecycle.version, keep_kv=True)
    state.change(asleep=asleep, state="asleep" if asleep else "ready", reason=None)


def reset_prefix_cache(state: EngineState, arguments: Arguments) -> Result:
    """Forgets cached prefixes; sequences that run keep what they hold."""
    return {"num_blocks": state.core.reset_prefix_cache()}


@dataclass(frozen=True, slots=True)
class Entry:
    arguments: type[msgspec.Struct]
    run: Run
    cancels: str | None = None  # the kind of operation that it ends first if it runs
    has_large_result: bool = False  # that is forgotten once whoever waited for it has it
    grace_s: float = 0.0  # beyond timeout_s, for one that keeps that time itself and says more when it is over


OPERATIONS: Mapping[str, Entry] = {
    "pause": Entry(PauseArguments, pause),
    "resume": Entry(Arguments, resume),
    "drain": Entry(DrainArguments, drain),
    "undrain": Entry(Arguments, undrain, cancels="drain"),
    "sleep": Entry(SleepArguments, sleep),
    "wake": Entry(WakeArguments, wake),
    "refresh_weights": Entry(refresh.RefreshArguments, refresh.refresh_weights),
    "begin_refresh": Entry(refresh.BeginArguments, refresh.begin_refresh),
    "apply_refresh": Entry(refresh.ApplyArguments, refresh.apply_refresh),
    "commit_refresh": Entry(refresh.CommitArguments, refresh.commit_refresh),
    "abort_refresh": Entry(Arguments, refresh.abort_refresh),
    "set_version": Entry(refresh.VersionArguments, refresh.set_version),
    "checksum": Entry(inspect.ChecksumArguments, inspect.checksum, has_large_result=True),
    "compare": Entry(inspect.CompareArguments, inspect.compare),
    "get_weight": Entry(inspect.WeightArguments, inspect.get_weight, has_large_result=True),
    "join_group": Entry(groups.JoinArguments, groups.join_group, grace_s=10.0),
    "leave_group": Entry(groups.LeaveArguments, groups.leave_group),
    "reset_prefix_cache": Entry(Arguments, reset_prefix_cache),
    "rebalance_experts": Entry(experts.RebalanceArguments, experts.rebalance_experts),
    AUTOMATIC: Entry(Arguments, experts.balance_experts),
}
