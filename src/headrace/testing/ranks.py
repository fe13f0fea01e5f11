"""A harness whose engine runs a tiny model on several ranks, processes of their own: for tests of what they share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.options import CacheConfig, ExpertsConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.engine.balancer import ExpertBalancer
from headrace.engine.core import EngineCore
from headrace.eplb import ExpertMap
from headrace.executor import create_executor
from headrace.executor.multiproc import MultiprocExecutor
from headrace.testing.harness import EngineHarness
from headrace.testing.refresh_rig import PROMPT
from headrace.transport import worker as wire
from headrace.types import FinishReason


class RankRig(EngineHarness):
    """Close it: it owns processes. `size` 1 is the same engine without any."""

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        has_whole_experts: bool = True,
        num_redundant: int = 0,
        expert_map: Path | None = None,
        model: ModelConfig | None = None,
        experts: ExpertsConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        is_spread = has_whole_experts and size > 1
        parallel = ParallelConfig(
            tensor_parallel_size=size,
            enable_expert_parallel=is_spread,
            redundant_experts=num_redundant if is_spread else 0,
            expert_map=None if expert_map is None else str(expert_map),
        )
        self.real = create_executor(model or ModelConfig(threads=1), path, parallel=parallel)
        self.core = EngineCore(
            self.real, CacheConfig(num_kv_blocks=128), SchedulerConfig(max_num_seqs=8), 256, clock=self.clock
        )
        self.core.on_lifecycle = self.lifecycles.append
        self.state.core = self.core
        self.state.remember(path)
        if self.real.expert_layers:
            self.state.balancer = ExpertBalancer(self.real, experts or ExpertsConfig(), self._woken.set)

    @property
    def balancer(self) -> ExpertBalancer:
        assert self.state.balancer is not None, "the model has experts"
        return self.state.balancer

    def copy_at_once(self) -> None:
        """From now on experts are copied before anybody looks, in no thread: what happens in which turn is certain."""
        self.real.expert_moves._thread = _AtOnce()  # type: ignore[union-attr]

    def generate(self, prompt: list[int] = PROMPT, max_tokens: int = 12) -> list[int]:
        request = self.submit(prompt, max_tokens=max_tokens, temperature=0.0)
        self.run()
        assert self.choice(request).finish is FinishReason.LENGTH
        return self.choice(request).token_ids

    def begin(self, prompt: list[int] = PROMPT, max_tokens: int = 6) -> int:
        """Submits a request whose answer `bits_of` has when it has ended."""
        return self.submit(prompt, max_tokens=max_tokens, temperature=0.0, logprobs=2, prompt_logprobs=1)

    def bits_of(self, request: int) -> tuple[object, ...]:
        """Tokens and all log probabilities, to compare bit for bit."""
        choice = self.choice(request)
        assert choice.finish is FinishReason.LENGTH, f"{choice.finish} {choice.error_code}"
        rows = {"logprobs": b"", "prompt_logprobs": b""}
        for detail in choice.details:
            for name in rows:
                part = getattr(detail, name)
                rows[name] += b"" if part is None else part.token_ids + part.logprobs
        return tuple(choice.token_ids), *rows.values()

    def bits(self, prompt: list[int] = PROMPT, max_tokens: int = 6) -> tuple[object, ...]:
        request = self.begin(prompt, max_tokens)
        self.run()
        return self.bits_of(request)

    def check_experts(self) -> None:
        """Each rank has the experts that the map gives it, with the same numbers wherever they are, and no others."""
        executor, current = self.real, self.real.expert_map
        assert isinstance(executor, MultiprocExecutor), "there are other ranks"
        assert current is not None, "each has whole experts"
        own = executor._own.weights
        assert own.set is not None, "asked while there are weights"
        for index, layer in enumerate(executor.expert_layers):
            slots_RP = current.slots_LP[index].reshape(current.num_ranks, -1)
            held = {name.split(".")[3] for name in own.set.handles if name.startswith(f"layers.{layer}.experts.")}
            assert held == set(map(str, slots_RP[0]))
            for expert in range(current.num_experts):
                name = f"layers.{layer}.experts.{expert}.down.weight"
                replies = executor._workers.call(wire.ReadWeight(name), "beside", may_fail=True)
                found = [reply.data if isinstance(reply, wire.Numbers) else None for reply in replies]
                found.insert(0, own.read_own(name)[0].tobytes() if own.holds(name) else None)
                assert [data is not None for data in found] == (slots_RP == expert).any(axis=1).tolist()
                assert len({data for data in found if data is not None}) == 1

    def close(self) -> None:
        self.real.close()


class _AtOnce:
    """As an executor of concurrent.futures."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **options: Any) -> None:
        pass


def random_map(like: ExpertMap, rng: np.random.Generator) -> ExpertMap:
    """Another map of the same sizes: every expert somewhere, the redundant slots anywhere."""
    num_slots = like.num_slots

    def row() -> np.ndarray:
        extra = rng.integers(0, like.num_experts, num_slots - like.num_experts)
        return rng.permutation(np.concatenate([np.arange(like.num_experts), extra]))

    return ExpertMap(np.stack([row() for _ in range(like.num_layers)]), like.num_experts, like.num_ranks)
