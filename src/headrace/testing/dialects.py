"""A front end for tests of the RL dialects: an idle fake engine that records, and what was asked of it."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

from headrace.config.options import ControlConfig
from headrace.errors import RequestError
from headrace.testing.fake_control import FakeControl
from headrace.testing.front_end import FakeClient, FrontEnd, make_front_end

REPLIES: dict[str, dict[str, Any]] = {
    "status": {"num_running": 0, "num_waiting": 0},
    "apply_refresh": {"num_tensors": 2, "num_bytes": 8, "num_missing": 0},
    "commit_refresh": {"num_tensors": 9, "num_bytes": 64, "version": "7", "epoch": 7},
    "refresh_weights": {"num_tensors": 9, "num_bytes": 64, "version": "7", "epoch": 7},
    "checksum": {"total": "ff", "tensors": {"a": "01", "b": "02"}},
    "compare": {"match": False, "mismatches": ["a"]},
    "get_weight": {"name": "a", "shape": [2], "dtype": "bfloat16", "values": [1.0, 2.0]},
}
OPEN_REFRESH = {"staged": True, "num_tensors": 2, "started": 100.0}
ONE_TENSOR = {"names": ["a"], "dtypes": ["torch.bfloat16"], "shapes": [[2, 3]]}
GROUP_SOURCE = {
    "kind": "group",
    "group_name": "weight_update_group",
    "names": ["a"],
    "dtypes": ["bfloat16"],
    "shapes": [[2, 3]],
    "load_format": None,
}
PICKLED = base64.b64encode(b"not looked into here").decode()


def dialect_front_end(
    *,
    allow_pickles: bool = False,
    errors: dict[str, RequestError] | None = None,
    missing: int = 0,
    **status: Any,
) -> FrontEnd:
    """`errors`: by operation; `missing`: tensors after each apply; `status`: what differs from an idle engine."""
    replies = {
        **REPLIES,
        "status": {**REPLIES["status"], **status},
        "apply_refresh": {**REPLIES["apply_refresh"], "num_missing": missing},
    }
    front_end = make_front_end(client=FakeClient(controlled=FakeControl(replies=replies, errors=errors or {})))
    context = front_end.app.state.context
    engine = dataclasses.replace(context.config.engine, control=ControlConfig(allow_pickled_weights=allow_pickles))
    config = dataclasses.replace(context.config, engine=engine)
    front_end.app.state.context = dataclasses.replace(context, config=config)
    return front_end


def operations(front_end: FrontEnd) -> list[tuple[str, dict[str, Any]]]:
    """What was asked of the engine, without the questions."""
    return [call for call in front_end.client.controlled.calls if call[0] not in ("status", "operations")]


def kinds(front_end: FrontEnd) -> list[str]:
    return [kind for kind, _ in operations(front_end)]
