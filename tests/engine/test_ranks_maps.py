"""Maps that no rank can move experts for: the one of the start, and one that is made while the weights sleep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.kernels import has_native
from headrace.testing.ranks import RankRig, random_map
from headrace.testing.tiny import write_tiny_model
from headrace.testing.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")


def write_model(folder: Path, seed: int) -> Path:
    return write_tiny_model(
        folder, architecture="qwen3_moe", seed=seed, num_layers=3, mlp_only_layers=[1], num_experts=6, expert_size=40,
        hidden_size=64,
    )  # fmt: skip


def test_experts_that_come_elsewhere_are_packed_as_they_were(tmp_path: Path) -> None:
    """Floats of a trainer are rounded to what the file had, on a rank that did not have this expert before too."""
    source = {"kind": "path", "path": str(write_model(tmp_path / "2", 2))}
    file = write_tiny_gguf(
        write_model(tmp_path / "1", 1), tmp_path / "model.gguf", kinds={"gate": "Q8_0", "up": "Q8_0"}
    )
    found = []
    for size in (1, 2):
        rig = RankRig(file, size)
        rig.control("sleep", tags=["weights"])
        if size == 2:
            target = rig.balancer.current.slots_LP[:, ::-1].tolist()
            rig.control("rebalance_experts", slots=target)
        rig.control("refresh_weights", source=source)
        if size == 2:
            assert rig.balancer.current.slots_LP.tolist() == target
            rig.check_experts()
        found.append(rig.bits())
        rig.close()
    assert found[0] == found[1]


def test_a_start_with_a_map(tmp_path: Path) -> None:
    """Such as the one that another server has come to. Its redundant slots need no other option."""
    rows = [[5, 4, 3, 2, 1, 0, 5, 2], [1, 1, 3, 0, 2, 5, 4, 0]]
    (tmp_path / "map.json").write_text(json.dumps({"slots": rows, "tokens": [], "mode": "manual"}))
    model = write_model(tmp_path / "model", 1)
    alone = RankRig(model, 1)
    expected = alone.bits()
    alone.close()
    rig = RankRig(model, 2, expert_map=tmp_path / "map.json")
    try:
        assert rig.balancer.current.slots_LP.tolist() == rows
        rig.check_experts()
        assert rig.bits() == expected
        rig.control(
            "rebalance_experts", slots=random_map(rig.balancer.current, np.random.default_rng(0)).slots_LP.tolist()
        )
        rig.control("rebalance_experts", action="reset")
        assert rig.balancer.current.slots_LP.tolist() == rows, "the map of the start"
        assert rig.bits() == expected
    finally:
        rig.close()
