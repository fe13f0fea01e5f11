"""The engine leaves no cycles behind: the collector would come in the middle of a step, and hold it up until it has
freed the prompts of many requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kernels import has_native
from headrace.testing.garbage import TRIES, collecting
from headrace.testing.ranks import RankRig
from headrace.testing.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_of_a_request_or_an_operation_waits_for_the_collector(tmp_path: Path, size: int) -> None:
    model = write_tiny_model(tmp_path / "moe", architecture="qwen3_moe", num_experts=4, expert_size=32)
    rig = RankRig(model, size)

    def work() -> None:
        for start in range(4):
            rig.bits(list(range(start, start + 60)))
        rig.abort(rig.begin())
        if size > 1:
            rig.control("rebalance_experts", slots=rig.balancer.current.slots_LP[:, ::-1].tolist())
        rig.control("refresh_weights", source={"kind": "path", "path": str(model)})
        rig.control("reset_prefix_cache")
        rig.control("sleep")
        rig.control("wake")
        rig.control("checksum")

    try:
        work()
        for _ in range(TRIES):
            with collecting() as found:
                work()
            if not found:
                break
        assert not found, sorted(set(found))
    finally:
        rig.close()
