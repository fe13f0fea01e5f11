"""Promise 3 over several ranks: an answer's bits are those of one rank that computes it alone, whatever is cut and how,
in a batch and in chunks, with a prefix cache, after preemption, prompt log probabilities and embeddings among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.config.options import ModelConfig, ParallelConfig
from headrace.executor import create_executor
from headrace.kernels import has_native
from headrace.testing.bits import Bits, Case, CoreRun, bits
from headrace.testing.tiny import write_tiny_model
from headrace.testing.tiny_gguf import write_tiny_gguf
from headrace.types import SamplingParams

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")
GREEDY = SamplingParams(temperature=0.0, logprobs=2, max_tokens=20, ignore_eos=True)
PARAMS = (
    GREEDY,
    SamplingParams(temperature=1.0, logprobs=0, max_tokens=20, ignore_eos=True, seed=7),
    SamplingParams(temperature=1.2, prompt_logprobs=1, logprobs=1, max_tokens=20, ignore_eos=True, seed=8),
)
LENGTHS = (1, 40, 9, 17, 70, 33)


@dataclass(frozen=True)
class Kind:
    """A model, how it is kept, and the ranks that it is spread over: how many, with whole experts or not, and how many
    second copies of experts."""

    architecture: str
    spreads: tuple[tuple[int, bool, int], ...]
    changes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gguf_kinds: dict[str, str] | None = None


def dense(architecture: str, sizes: tuple[int, ...], **changes: Any) -> Kind:
    return Kind(architecture, tuple((size, False, 0) for size in sizes), changes)


def moe(architecture: str, *spreads: tuple[int, bool, int], **changes: Any) -> Kind:
    sizes = {"num_experts": 6, "num_experts_per_token": 2, "expert_size": 40, "router_skew": 1.0}
    return Kind(architecture, spreads, sizes | changes)


GEMMA = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0, "sliding_window": 20, "num_layers": 6}
KINDS = {
    "llama": dense("llama", (4,), num_kv_heads=2),  # 4 ranks share 2 KV heads
    "qwen3": dense("qwen3", (3,), num_kv_heads=4),
    "gemma3": dense("gemma3_text", (2,), has_tied_head=True, query_pre_attn_scalar=16, **GEMMA),
    "int8 KV": Kind("llama", ((2, False, 0),), options={"kv_cache_dtype": "int8"}),
    "w8": Kind("llama", ((2, False, 0),), options={"quantization": "w8"}),
    "GGUF": Kind("llama", ((2, False, 0),), gguf_kinds={}),
    "qwen3_moe": moe("qwen3_moe", (2, True, 4), (4, False, 0), mlp_only_layers=[1], num_layers=3),
    "qwen2_moe": moe("qwen2_moe", (2, True, 0), (2, False, 0), shared_expert_intermediate_size=20),
    "mixtral": moe("mixtral", (3, True, 3), (3, False, 0), num_kv_heads=4),
    "olmoe": moe("olmoe", (2, True, 0), (2, False, 0), num_kv_heads=4),
    "ernie": moe("ernie4_5_moe", (2, True, 0), (2, False, 0), moe_num_shared_experts=1),
    "w4 experts": Kind(
        "qwen3_moe", ((4, True, 2), (2, False, 0)), {"num_experts": 6, "expert_size": 64}, {"quantization": "w4"}
    ),
}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """The second half goes on from what the first half has asked."""
    rng = random.Random(11)
    prompts = [tuple(rng.randrange(256) for _ in range(length)) for length in LENGTHS]
    prompts += [(*prompt, 7, 8, 9) for prompt in prompts]
    pooled = [Case(prompts[4], SamplingParams(pooling=pooling)) for pooling in ("last", "mean")]
    return [*(Case(prompt, PARAMS[i % 3]) for i, prompt in enumerate(prompts)), *pooled]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    root = tmp_path_factory.mktemp("ranks")

    def write(kind: Kind) -> Path:
        sizes = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 2} | kind.changes
        name = str(len(list(root.iterdir())))
        folder = write_tiny_model(root / name, architecture=kind.architecture, **sizes)
        if kind.gguf_kinds is None:
            return folder
        return write_tiny_gguf(folder, root / f"{name}.gguf", kinds=kind.gguf_kinds)

    return write


def run_alone(path: Path, options: dict[str, Any], cases: list[Case]) -> list[list[Bits]]:
    executor = create_executor(ModelConfig(threads=1, **options), path)
    core = CoreRun(executor, block_size=16, prefix_cache=False)
    return [bits(core.run([case]))[0] for case in cases]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_ranks_give_the_bits_of_one(kind: Kind, make: Callable[[Kind], Path], cases: list[Case]) -> None:
    path = make(kind)
    expected = run_alone(path, kind.options, cases)
    assert len({str(choices) for choices in expected}) == len(cases)
    for size, has_whole_experts, num_redundant in kind.spreads:
        parallel = ParallelConfig(
            tensor_parallel_size=size, enable_expert_parallel=has_whole_experts, redundant_experts=num_redundant
        )
        executor = create_executor(ModelConfig(threads=size, **kind.options), path, parallel=parallel)
        try:
            core = CoreRun(executor, block_size=16, chunk=29, num_blocks=14, max_num_seqs=5)
            first, second = core.run(cases), core.run(cases)
            assert bits(first) == expected, f"{size} ranks"
            assert bits(second) == expected, f"{size} ranks, again"
            assert core.core.stats().num_preemptions > 0, "the blocks must run out for this test to say anything"
            assert any(choices[0].num_cached_tokens for choices in second)
        finally:
            executor.close()
