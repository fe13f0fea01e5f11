"""Operations on experts: what would be done, doing it, and undoing it. The state is `engine/balancer.py`'s.

An `apply` changes one layer after the other, so that memory for one layer's experts is enough; where it ends early, the
layers that were changed stay as they are, each with its weights and its row of the map together. `stage` and `commit`
change all layers between the same two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.engine.balancer import ExpertBalancer, Run, RunState
from headrace.engine.control.state import EngineState, Steps
from headrace.eplb import Action, ExpertMap, MapData, Proposal
from headrace.errors import Conflict, InvalidRequest, RequestError

Result = dict[str, Any]
RebalanceAction = Literal["apply", "plan", "begin", "stage", "commit", "abort", "pin", "unpin", "reset"]


class RebalanceArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: RebalanceAction = "apply"
    slots: list[list[int]] | None = None  # a map of one's own: [layers with experts][slots]
    tokens: list[list[int]] | None = None  # loads to plan for: [layers with experts][experts]; else the window's
    run: str | None = None  # which one is meant; to begin or stage, what it shall be called
    silence_s: float | None = None  # begun or staged, it is given up when so long nobody has spoken of it
    timeout_s: float | None = None


def rebalance_experts(state: EngineState, arguments: RebalanceArguments) -> Steps[Result] | Result:
    """Refused while a refresh is open, and where there are no experts to move. What is staged under the id of a run
    that was begun goes on with that one. While the weights sleep, an `apply` changes the map alone."""
    balancer = balancer_of(state)
    _ = balancer.mover  # or a Conflict
    if arguments.action == "unpin":
        balancer.pinned = False
        return _result(balancer)
    if arguments.action == "abort":
        balancer.end(balancer.the_run(arguments.run, RunState.OPEN, RunState.STAGED), "aborted")
        return _result(balancer)
    if arguments.action == "plan":
        return _plan(state, balancer, arguments)
    if arguments.action == "begin":
        refuse_without_weights(state)
        balancer.open_run(arguments.run, RunState.OPEN).silence_s = arguments.silence_s
        return _result(balancer)
    if arguments.action == "stage":
        return _stage(state, balancer, arguments)
    if arguments.action == "commit":
        refuse_without_weights(state)
        return commit(balancer, arguments.run)
    refuse_refresh(state)
    return _apply(state, balancer, arguments)


def balance_experts(state: EngineState, arguments: msgspec.Struct) -> Steps[Result]:
    """A round of the automatic policy."""
    balancer = balancer_of(state)
    proposal = yield from state.background(balancer.decide)
    balancer.note(proposal.decision)
    if proposal.target is not None and proposal.decision.action is Action.APPLY:
        refuse_without_weights(state)
        yield from _change(state, balancer.open_run(), proposal.target)
    return _result(balancer)


def balancer_of(state: EngineState) -> ExpertBalancer:
    if state.balancer is None:
        raise Conflict("The model that is served has no experts.", code="no_experts")
    return state.balancer


def refuse_refresh(state: EngineState) -> None:
    if state.refresh is not None:
        raise Conflict("A refresh is open: experts move when it has ended.", code="refresh_open")


def refuse_without_weights(state: EngineState) -> None:
    refuse_refresh(state)
    if not state.has_weights:
        raise Conflict(f"There are no weights to move: the state is {state.lifecycle.state}.", code="no_weights")


def _plan(state: EngineState, balancer: ExpertBalancer, arguments: RebalanceArguments) -> Steps[Result]:
    """A dry run."""
    proposal = yield from state.background(_proposing(balancer, arguments))
    balancer.note(proposal.decision)
    decision = msgspec.to_builtins(proposal.decision)
    slots = (proposal.target or balancer.current).slots_LP.tolist()
    return {"decision": decision, "slots": slots, "bytes_to_move": proposal.decision.bytes_to_move}


def _stage(state: EngineState, balancer: ExpertBalancer, arguments: RebalanceArguments) -> Steps[Result]:
    if not balancer.is_begun(arguments.run):  # else what is wrong ends that run
        refuse_without_weights(state)
        _proposing(balancer, arguments)
    run = balancer.open_run(arguments.run)
    run.silence_s = run.silence_s if arguments.silence_s is None else arguments.silence_s
    try:
        refuse_without_weights(state)
        proposal = yield from state.background(_proposing(balancer, arguments))
        balancer.note(proposal.decision)
        target = proposal.target or balancer.current
        yield from balancer.move(run, target, balancer.changed(target))
    except BaseException as error:
        balancer.end(run, "failed", str(error))
        raise
    run.state, run.target = RunState.STAGED, target
    balancer.hear(run.id)
    return _result(balancer)


def commit(balancer: ExpertBalancer, run_id: str | None) -> Result:
    """What was staged takes effect between two steps, on all layers and ranks."""
    run = balancer.the_run(run_id, RunState.STAGED)
    assert run.target is not None, "of a staged run"
    balancer.place(run, balancer.changed(run.target))
    balancer.end(run, "committed")
    return _result(balancer)


def _apply(state: EngineState, balancer: ExpertBalancer, arguments: RebalanceArguments) -> Steps[Result]:
    if arguments.action == "reset":
        assert balancer.first_map is not None, "there are experts to move"
        yield from _change(state, balancer.open_run(arguments.run), balancer.first_map)
        balancer.pinned = False
        balancer.count()
        balancer.window.read(clear=True)
        return _result(balancer)
    if arguments.action == "pin" and arguments.slots is None:
        balancer.pinned = True
        return _result(balancer)
    proposing = _proposing(balancer, arguments)
    run = balancer.open_run(arguments.run)
    try:
        proposal = yield from state.background(proposing)
    except BaseException as error:
        balancer.end(run, "failed", str(error))
        raise
    balancer.note(proposal.decision)
    yield from _change(state, run, proposal.target or balancer.current)
    balancer.pinned = balancer.pinned or arguments.action == "pin"
    return _result(balancer)


def _change(state: EngineState, run: Run, target: ExpertMap) -> Steps[None]:
    """Layer after layer; what fails keeps the map of the layers that were not reached. Without weights, all at once."""
    balancer = balancer_of(state)
    try:
        if not state.has_weights:
            balancer.remap(run, target)
        for row in balancer.changed(target):
            yield from balancer.move(run, target, [row])
            balancer.place(run, [row])
    except BaseException as error:
        if isinstance(error, RequestError):
            error.message += f" {run.layers_changed} layers have the new map, the others keep the old one."
        balancer.end(run, "failed", str(error))
        raise
    balancer.end(run, "committed")


def _proposing(balancer: ExpertBalancer, arguments: RebalanceArguments) -> Callable[[], Proposal]:
    """What to run in a thread. Raises InvalidRequest for a map or loads of another shape."""
    current = balancer.current
    balancer.count()
    if arguments.slots is not None:
        target = ExpertMap.from_data(MapData(current.num_experts, current.num_ranks, arguments.slots))
        if target.slots_LP.shape != current.slots_LP.shape:
            raise InvalidRequest(
                f"slots have the shape {list(target.slots_LP.shape)}; {list(current.slots_LP.shape)} is needed.",
                param="slots",
            )
        return lambda: balancer.propose(target=target)
    if arguments.tokens is None:
        return balancer.propose
    tokens_LE = loads_of(arguments.tokens, (current.num_layers, current.num_experts))
    return lambda: balancer.propose(tokens_LE)


def loads_of(tokens: list[list[int]], shape: tuple[int, int]) -> np.ndarray:
    """Raises InvalidRequest."""
    if len(tokens) != shape[0] or any(len(row) != shape[1] for row in tokens):
        raise InvalidRequest(
            f"tokens must be {shape[0]} lists (layers with experts) of {shape[1]} numbers (experts).", param="tokens"
        )
    if any(not 0 <= value < 1 << 53 for row in tokens for value in row):
        raise InvalidRequest("tokens must be from 0 to 2^53.", param="tokens")
    return np.array(tokens, np.int64)


def _result(balancer: ExpertBalancer) -> Result:
    mean, worst = balancer.balance_now()
    run = balancer.run
    return {
        "run": None if run is None else run.as_object(),
        "balance": {"mean": mean, "worst": worst},
        "mode": balancer.report_mode,
    }
