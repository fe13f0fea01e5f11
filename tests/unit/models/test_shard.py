"""What each rank holds: together all of a model, each number once, and nothing that the others do not expect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.models.config import DecoderConfig, MoeConfig, RopeConfig
from headrace.models.plan import expected_tensors
from headrace.models.shard import Shard, Sharding
from headrace.weights.tensor import CheckpointTensor

LLAMA = DecoderConfig(
    architecture="llama",
    vocab_size=200,
    hidden_size=64,
    intermediate_size=100,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4, rotary_dim=8),
)
MOE = MoeConfig(moe_layers=(False, True), num_experts=6, num_experts_per_token=2, expert_size=40)
sizes = st.integers(1, 400)


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    num_layers, num_kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    moe = MoeConfig(
        moe_layers=tuple(draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers))),
        num_experts=draw(st.integers(1, 5)),
        num_experts_per_token=1,
        expert_size=draw(sizes),
        shared_size=draw(st.just(0) | sizes),
    )
    has_biases = draw(st.booleans())
    return replace(
        LLAMA,
        vocab_size=draw(st.integers(64, 400)),
        hidden_size=draw(sizes),
        intermediate_size=draw(sizes),
        num_layers=num_layers,
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 20])),
        qk_norm=draw(st.sampled_from([None, "head", "whole"])),
        has_tied_head=draw(st.booleans()),
        has_qkv_bias=has_biases,
        has_output_bias=has_biases,
        has_mlp_bias=has_biases,
        moe=moe if any(moe.moe_layers) and draw(st.booleans()) else None,
    )


def shards_of(config: DecoderConfig, size: int, **options: Any) -> tuple[Shard, ...]:
    return Shard.of(config, Sharding(size=size, **options)).ranks


@settings(max_examples=150, deadline=None)
@given(config=configs(), size=st.integers(2, 16), has_whole_experts=st.booleans())
def test_the_rows_of_all_ranks_are_a_model(config: DecoderConfig, size: int, has_whole_experts: bool) -> None:
    num_experts = 0 if config.moe is None else config.moe.num_experts
    is_spread = has_whole_experts and num_experts >= size  # else the redundant ones may be too many for the ranks
    num_redundant = -num_experts % size if is_spread else 0
    problem = ""
    try:
        shards = shards_of(config, size, has_whole_experts=is_spread, num_redundant=num_redundant)
    except ConfigError as error:
        problem = str(error)
    if problem:
        assert problem.startswith(f"--tensor-parallel-size {size} is not possible: ")
        return
    for name, (total, *_) in expected_tensors(config).items():
        parts = [shard.rows(name, total) for shard in shards]
        assert all(parts), f"{name}: a rank has nothing"
        if all(part == range(total) for part in parts):
            continue  # every rank has all of it
        copies = shards[0].copies_of(name)
        assert [row for part in parts[::copies] for row in part] == list(range(total)), name
        assert parts == [part for part in parts[::copies] for _ in range(copies)], name
    for total in (config.vocab_size, config.hidden_size, config.intermediate_size):
        assert [len(shard.part(total)) for shard in shards] == list(shards[0].sizes(total))
        assert sum(shards[0].sizes(total)) == total
    assert sum(shards[0].attention_sizes) == config.num_heads * config.head_dim
    for shard in shards:
        per_kv = config.num_heads // config.num_kv_heads
        assert {head // per_kv for head in shard.q_heads} == set(shard.kv_heads), "each query head finds its keys"
        assert len(shard.q_heads) % len(shard.kv_heads) == 0
        q_rows = shard.rows("layers.0.q.weight", config.num_heads * config.head_dim)
        assert len(q_rows) == shard.attention_sizes[shard.rank]


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (64, 4, (16, 16, 16, 16)),
        (100, 4, (16, 32, 32, 20)),
        (100, 3, (32, 32, 36)),
        (40, 4, (10, 10, 10, 10)),  # too few tiles for all: rows are shared out alone
        (5, 4, (1, 1, 1, 2)),
    ],
)
def test_parts_are_whole_tiles_where_there_are_enough(total: int, size: int, expected: tuple[int, ...]) -> None:
    assert shards_of(replace(LLAMA, num_heads=8, num_kv_heads=8), size)[0].sizes(total) == expected


def test_more_ranks_than_kv_heads_share_one_each() -> None:
    shards = shards_of(LLAMA, 4)
    assert [(list(shard.kv_heads), list(shard.q_heads)) for shard in shards] == [
        ([0], [0, 1]),
        ([0], [2, 3]),
        ([1], [4, 5]),
        ([1], [6, 7]),
    ]
    assert shards[0].copies_of("layers.0.k.weight") == 2
    assert shards[0].copies_of("layers.0.q.weight") == 1


@pytest.mark.parametrize(
    ("changes", "size", "why"),
    [
        ({}, 3, "8 query heads and 2 key-value heads; up to 2 ranks, or a multiple of that which divides 8"),
        ({}, 16, "8 query heads and 2 key-value heads"),
        ({"num_heads": 12, "num_kv_heads": 4}, 8, "12 query heads and 4 key-value heads"),
        ({"qk_norm": "whole"}, 4, "8 query heads and 2 key-value heads"),
        ({"intermediate_size": 1}, 2, "a matrix has only 1 rows"),
        ({"moe": replace(MOE, expert_size=1)}, 2, "a matrix has only 1 rows"),
        ({"moe": replace(MOE, shared_size=1)}, 2, "a matrix has only 1 rows"),
    ],
)
def test_what_cannot_be_cut(changes: dict[str, Any], size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--tensor-parallel-size {size} is not possible: .*{why}"):
        shards_of(replace(LLAMA, **changes), size)


def test_redundant_experts_must_divide() -> None:
    config = replace(LLAMA, moe=MOE, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"is 1: 6 experts .* 4 ranks; allowed: 2, 6, 10, 14"):
        shards_of(config, 4, has_whole_experts=True, num_redundant=1)
    shards = shards_of(config, 4, has_whole_experts=True, num_redundant=2)
    experts = shards[0].experts
    assert experts is not None
    assert experts.slots_LP.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]], "one row: the other layer is dense"
    held = [[expert for expert in range(6) if shard.holds(f"layers.1.experts.{expert}.down")] for shard in shards]
    assert held == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert [shard.own_slots for shard in shards] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert all(shard.holds("layers.0.mlp") and shard.holds("layers.1.router") for shard in shards)
    assert shards[1].rows("layers.1.experts.2.gate.weight", 40) == range(40), "whole"
    assert shards_of(config, 4)[1].rows("layers.1.experts.2.gate.weight", 40) == range(10, 20), "cut"


@pytest.mark.parametrize(
    ("slots", "num_redundant", "why"),
    [
        ([[0, 1, 2, 3, 4, 5]] * 2, 0, "--expert-map has 2 rows; the model has 1 layers with experts"),
        ([[0, 1, 2, 3, 4, 5, 0, 1]], 4, "--expert-map has 2 redundant slots; --redundant-experts is 4"),
        ([], 0, "--expert-map has 0 slots in a row; the model has 6 experts"),
        ([[0, 1, 2, 3]], 0, "--expert-map has 4 slots in a row; the model has 6 experts"),
        ([[0, 1, 2, 3, 4, 5, 0]], 0, "--expert-map is not possible: .*num_ranks is 2; it must divide the 7 slots"),
        ([[0, 1, 2, 3, 4, 4]], 0, "--expert-map is not possible: .*no copy of expert 5"),
        ([[0, 1, 2, 3, 4, 9]], 0, r"--expert-map is not possible: .*slots\[0\]\[5\] is 9"),
    ],
)
def test_a_map_to_start_with_must_fit(slots: list[list[int]], num_redundant: int, why: str) -> None:
    config = replace(LLAMA, moe=MOE)
    with pytest.raises(ConfigError, match=f"^{why}"):
        shards_of(config, 2, has_whole_experts=True, num_redundant=num_redundant, slots=slots)


@pytest.mark.parametrize(
    ("options", "option"),
    [({"num_redundant": 2}, "--redundant-experts"), ({"slots": [[0, 1]]}, "--expert-map")],
)
def test_a_model_without_experts_has_none_to_place(options: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} is not possible: llama has no experts"):
        shards_of(LLAMA, 2, has_whole_experts=True, **options)


def test_a_cut_is_a_view_of_its_rows() -> None:
    numbers = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)
    tensor = CheckpointTensor.from_floats("q_proj", numbers)
    for shard in shards_of(LLAMA, 4):
        rows = shard.rows("layers.0.q.weight", 64)
        cut = shard.cut("layers.0.q.weight", tensor)
        assert np.shares_memory(cut.data, tensor.data)
        np.testing.assert_array_equal(cut.dequantize(), numbers[rows.start : rows.stop])
        assert shard.cut("layers.0.attn_norm.weight", tensor) is tensor
