"""New weights as a transaction: begin, apply as often as it takes, commit or abort.

Staged, the new set is packed beside the old one, which serves until the commit and stays if there is none. In place,
the old set goes first, so memory holds one; until the commit the engine is UPDATING, and POISONED if there is none.
A commit falls between two steps: weights, version and the epoch of the KV keys change together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.engine.control.sources import Source, check, read_into
from headrace.engine.control.state import EngineState, OpenRefresh, PauseMode, Steps
from headrace.engine.sizing import available_memory
from headrace.errors import Conflict, InvalidRequest, RequestError

Result = dict[str, Any]
Staged = Literal["auto", "always", "never"]
KVMode = Literal["recompute", "keep"]
_ROOM = 1.25  # staging wants this many times the weights' size of free memory
_SPARE_BYTES = 256 * 1024 * 1024


class BeginArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    staged: Staged = "auto"
    delta: bool = False
    mode: PauseMode = "keep"  # in place: what becomes of the requests that run
    silence_s: float | None = None  # between two calls of its sender


class ApplyArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: Source
    checksums: dict[str, str] | None = None  # of tensors as they came
    timeout_s: float | None = None


class CommitArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str | None = None  # None: the epoch
    mode: PauseMode = "keep"
    kv: KVMode = "recompute"  # of the requests that go on
    timeout_s: float | None = None


class RefreshArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: Source
    version: str | None = None
    mode: PauseMode = "keep"
    kv: KVMode = "recompute"
    staged: Staged = "auto"
    delta: bool = False
    checksums: dict[str, str] | None = None
    timeout_s: float | None = None


class VersionArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str


def begin_refresh(state: EngineState, arguments: BeginArguments) -> Steps[Result]:
    if state.refresh is not None:
        raise Conflict("A refresh is open already: commit or abort it first.", code="refresh_open")
    state.forget_staged_experts("a refresh has begun")
    is_staged = _decide(state, arguments)
    if arguments.silence_s is not None and arguments.silence_s <= 0:
        raise InvalidRequest(f"silence_s must be above 0, got {arguments.silence_s:g}.", param="silence_s")
    if not is_staged:
        yield from state.settle(arguments.mode)
        state.executor.drop_weights()
        asleep = tuple(tag for tag in state.lifecycle.asleep if tag != "weights")
        state.change(state="updating", reason=None, asleep=asleep)
    state.refresh = OpenRefresh(
        stage=state.executor.open_stage(is_delta=arguments.delta),
        is_staged=is_staged,
        is_delta=arguments.delta,
        started=time.time(),
        began_s=state.clock(),
        last_heard_s=state.clock(),
        silence_s=arguments.silence_s or state.config.refresh_timeout,
    )
    return {"staged": is_staged}


def _decide(state: EngineState, arguments: BeginArguments) -> bool:
    """Whether the new weights go beside the old ones. Where there are no old ones there is nothing to keep."""
    if arguments.delta:
        if not state.has_weights:
            raise Conflict(f"A delta changes weights, and there are none: the state is {state.lifecycle.state}.")
        if arguments.staged == "never":
            raise InvalidRequest("A delta is always staged: it needs the weights that it changes.", param="staged")
        return True
    if not state.has_weights or arguments.staged == "never":
        return False
    needed = int(state.executor.weights_bytes * _ROOM) + _SPARE_BYTES
    return arguments.staged == "always" or available_memory() > needed


def apply_refresh(state: EngineState, arguments: ApplyArguments) -> Steps[Result]:
    """Takes tensors, all of the call or none; after a failure the refresh is as it was before."""
    refresh = _open(state)
    before = refresh.stage.num_tensors, refresh.stage.num_bytes
    started_s = state.clock()
    with _in_use(state, refresh):
        work = partial(read_into, refresh.stage, arguments.source, arguments.checksums, state)
        yield from state.on_stage(work)
    refresh.apply_s += state.clock() - started_s
    refresh.sources += 1
    refresh.kinds.add(arguments.source.kind)
    path = arguments.source.path
    is_whole = path is not None and refresh.sources == 1 and not refresh.is_delta
    refresh.path = Path(path) if path is not None and is_whole else None
    num_tensors, num_bytes = refresh.stage.num_tensors - before[0], refresh.stage.num_bytes - before[1]
    return {"num_tensors": num_tensors, "num_bytes": num_bytes, "num_missing": len(refresh.stage.missing())}


def commit_refresh(state: EngineState, arguments: CommitArguments) -> Steps[Result]:
    refresh = _open(state)
    stage, started_s = refresh.stage, state.clock()
    with _in_use(state, refresh):
        yield from state.on_stage(partial(state.executor.finish, stage))
        finish_s = state.clock() - started_s
        yield from state.settle(arguments.mode)
    stall_s = _swap(state, refresh, arguments)
    return {
        "num_tensors": stage.num_tensors,
        "num_bytes": stage.num_bytes,
        "version": state.lifecycle.version,
        "epoch": state.lifecycle.epoch,
        "staged": refresh.is_staged,
        "read_s": round(refresh.apply_s - stage.pack_s, 6),
        "pack_s": round(stage.pack_s + finish_s, 6),
        "stall_s": round(stall_s, 6),
    }


def _swap(state: EngineState, refresh: OpenRefresh, arguments: CommitArguments) -> float:
    """All that changes at a commit, between two steps. Returns the seconds that it took."""
    started_s = state.clock()
    state.forget_staged_experts("the weights were refreshed")
    state.executor.swap(refresh.stage)
    state.refresh = None
    state.remember(refresh.path)
    version = arguments.version if arguments.version is not None else str(state.lifecycle.epoch + 1)
    state.core.adopt_weights(version, keep_kv=arguments.kv == "keep")
    asleep = tuple(tag for tag in state.lifecycle.asleep if tag != "weights")
    state.change(state="asleep" if asleep else "ready", reason=None, asleep=asleep)
    now_s = state.clock()
    state.core.counts.count_refresh(refresh.kinds, now_s - refresh.began_s)
    return now_s - started_s


def abort_refresh(state: EngineState, arguments: msgspec.Struct) -> Result:
    state.drop_refresh("a refresh was aborted")
    return {"state": state.lifecycle.state}


def refresh_weights(state: EngineState, arguments: RefreshArguments) -> Steps[Result]:
    """All three in one; whatever fails aborts it."""
    begin = BeginArguments(arguments.staged, arguments.delta, arguments.mode)
    if state.refresh is None and not _decide(state, begin):  # weights that serve may have to go: look twice
        probe = state.executor.open_stage(is_delta=False)
        try:
            yield from state.background(partial(check, probe, arguments.source, state))
        finally:
            state.executor.close_stage(probe)
    yield from begin_refresh(state, begin)
    try:
        yield from apply_refresh(state, ApplyArguments(arguments.source, arguments.checksums))
        commit = CommitArguments(arguments.version, arguments.mode, arguments.kv)
        return (yield from commit_refresh(state, commit))
    except RequestError as error:
        state.drop_refresh(f"a refresh failed: {error}")
        if state.lifecycle.state == "poisoned":
            error.message += " The old weights had gone already: the engine is poisoned until a refresh succeeds."
        raise
    except BaseException as error:
        state.drop_refresh(f"a refresh failed: {error}")
        raise


def set_version(state: EngineState, arguments: VersionArguments) -> Result:
    """Another label for the weights in use."""
    state.change(version=arguments.version)
    return {"version": arguments.version}


@contextmanager
def _in_use(state: EngineState, refresh: OpenRefresh) -> Iterator[None]:
    """Its sender is not silent while an operation works on it, however long that takes."""
    refresh.last_heard_s = math.inf
    try:
        yield
    finally:
        refresh.last_heard_s = state.clock()


def _open(state: EngineState) -> OpenRefresh:
    if state.refresh is None:
        raise Conflict("No refresh is open: begin_refresh comes first (an old one may have ended in silence).")
    return state.refresh
