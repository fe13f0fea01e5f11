"""Looks at the weights in use: checksums, single tensors, a comparison with a folder.

All of them read what steps compute with, not what was once received.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.control.state import EngineState, Steps
from headrace.errors import Conflict, InvalidRequest
from headrace.weights.incoming import tensor_checksum
from headrace.weights.incoming.checksum import total_of
from headrace.weights.tensor import CheckpointTensor

MAX_VALUES = 1_000_000


class ChecksumArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[str] | None = None  # None: all


class CompareArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str


class WeightArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    max_values: int = 100


def checksum(state: EngineState, arguments: ChecksumArguments) -> Steps[dict[str, Any]]:
    """Of tensors as they are used, in float32; the total over those that were asked for."""
    _need_weights(state)

    def compute() -> dict[str, str]:
        names = state.executor.weight_names() if arguments.names is None else arguments.names
        return {
            name: tensor_checksum(CheckpointTensor.from_floats(name, state.executor.read_weight(name)))
            for name in names
        }

    sums = yield from state.background(compute)
    return {"total": total_of(sums), "tensors": sums}


def compare(state: EngineState, arguments: CompareArguments) -> Steps[dict[str, Any]]:
    """Which tensors differ from those of a folder or file, packed in the same way."""
    _need_weights(state)
    stage = state.executor.open_stage(is_delta=False)

    def run() -> list[str]:
        stage.add_path(Path(arguments.path))
        return state.executor.differing(stage)

    try:
        mismatches = yield from state.background(run)
    finally:
        state.executor.close_stage(stage)
    return {"match": not mismatches, "mismatches": mismatches}


def get_weight(state: EngineState, arguments: WeightArguments) -> Steps[dict[str, Any]]:
    """The first values of a tensor, flat."""
    _need_weights(state)
    if not 1 <= arguments.max_values <= MAX_VALUES:
        raise InvalidRequest(
            f"max_values must be from 1 to {MAX_VALUES}, got {arguments.max_values}.", param="max_values"
        )
    values = yield from state.background(lambda: state.executor.read_weight(arguments.name))
    return {
        "name": arguments.name,
        "shape": list(values.shape),
        "dtype": "float32",
        "values": values.reshape(-1)[: arguments.max_values].tolist(),
    }


def _need_weights(state: EngineState) -> None:
    if not state.has_weights:
        raise Conflict(f"There are no weights to look at: the state is {state.lifecycle.state}.", code="no_weights")
