"""What rebalancing experts is worth: balance and step time before and after, what it moves, how long steps wait for it.

    python bench/balance.py --ranks 2 4 --redundant 0 16

A mixture-of-experts model with random weights and a router that prefers few experts (tokens by Zipf's law) serves many
sequences; each step computes chunks of prompts. In each round the same work is done with the initial map, while experts
move, and with the new map; all answers must be equal, bit by bit, to those of a server with one rank. Times are ratios
to that of the initial map in the same round: the median, the least and the most. What a step waits for is the time
between two steps, while experts move and, for what the machine itself does, with the initial map. `--picture` draws the
loads of experts and ranks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.cli.experts_heatmap import draw_png, picture_of_reply
from headrace.config.options import (
    CacheConfig,
    ControlConfig,
    ExpertsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from headrace.engine.balancer import ExpertBalancer
from headrace.engine.control import ControlPlane
from headrace.engine.control.state import EngineState
from headrace.engine.core import EngineCore
from headrace.eplb import ExpertMap
from headrace.errors import FailedRequest
from headrace.executor import create_executor
from headrace.testing.tiny import write_tiny_model
from headrace.transport.messages import Control, ControlDone, Submit
from headrace.types import RequestId, SamplingParams

SHAPE: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "expert_size": 512,
    "router_skew": 1.0,
}
CHUNK, PROMPT, NUM_SEQUENCES, OUTPUT = 512, 384, 16, 16
CLIENT = 0


class Engine:
    """The engine of a server in this process, with worker processes where there are several ranks."""

    def __init__(self, model: Path, ranks: int, redundant: int) -> None:
        parallel = ParallelConfig(
            tensor_parallel_size=ranks, enable_expert_parallel=ranks > 1, redundant_experts=redundant
        )
        self.executor = create_executor(ModelConfig(quantization="w8"), model, parallel=parallel)
        self.core = EngineCore(
            self.executor,
            CacheConfig(num_kv_blocks=2048, enable_prefix_caching=False),
            SchedulerConfig(max_num_seqs=NUM_SEQUENCES, max_num_batched_tokens=CHUNK),
        )
        self.woken = threading.Event()
        self.state = EngineState(self.core, ControlConfig(), model, self.woken.set)
        self.state.balancer = self.balancer = ExpertBalancer(self.executor, ExpertsConfig(), self.woken.set)
        self.answers: dict[int, ControlDone] = {}
        self.plane = ControlPlane(self.state, lambda _, done: self.answers.__setitem__(done.call_id, done))
        self.request_ids, self.call_ids = itertools.count(), itertools.count()
        self.waits_s: list[float] = []  # between two steps

    def serve(self, prompts: list[tuple[int, ...]]) -> dict[int, list[int]]:
        """Answers by prompt."""
        first = next(self.request_ids)
        names = {first: 0}
        for index in range(1, len(prompts)):
            names[next(self.request_ids)] = index
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, seed=0, ignore_eos=True)
        for name, index in names.items():
            request = Submit(request_id=RequestId(name), public_id=f"r{name}", prompts=(prompts[index],), params=params)
            self.core.submit(CLIENT, request)
        answers: dict[int, list[int]] = {index: [] for index in names.values()}
        while self.core.has_work:
            outputs = self.core.step()
            ended_s = time.perf_counter()
            self.plane.advance()
            self.waits_s.append(time.perf_counter() - ended_s)
            if CLIENT in outputs:
                rows, at = outputs[CLIENT], 0
                for name, count in zip(rows.request_ids, rows.num_tokens, strict=True):
                    answers[names[name]] += rows.token_ids[at : at + count]
                    at += count
        return answers

    def start(self, **arguments: Any) -> int:
        call_id = next(self.call_ids)
        self.plane.handle(CLIENT, Control(call_id=call_id, operation="rebalance_experts", arguments=arguments))
        return call_id

    def finish(self, call_id: int) -> dict[str, Any]:
        while call_id not in self.answers:
            self.woken.wait()
            self.woken.clear()
            self.plane.advance()
        done = self.answers[call_id]
        if done.error is not None:
            raise FailedRequest(done.error)
        assert done.result is not None, "no error"
        result: dict[str, Any] = done.result["result"][0]
        return result

    def use(self, target: ExpertMap) -> None:
        self.finish(self.start(slots=target.slots_LP.tolist()))

    def measure(self, prompts: list[tuple[int, ...]]) -> tuple[dict[int, list[int]], float]:
        """Answers, and the seconds from the first step to the last."""
        self.waits_s.clear()
        started_s = time.perf_counter()
        answers = self.serve(prompts)
        return answers, time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--redundant", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skew", type=float, default=SHAPE["router_skew"])
    parser.add_argument(
        "--hottest-together", action="store_true", help="begin with a map that has the hottest experts on one rank"
    )
    parser.add_argument(
        "--picture", metavar="PREFIX", help="draws PREFIX-before.png and PREFIX-after.png of the last row"
    )
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(300, 2048, PROMPT).tolist()) for _ in range(NUM_SEQUENCES)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", **SHAPE | {"router_skew": options.skew})
        alone = Engine(model, 1, 0)
        expected = alone.serve(prompts)
        alone.executor.close()
        print(
            "| ranks | redundant | balance (worst layer) | after | time after | time while moving | MB moved "
            "| a step waits: mean, 99%, most (without moving) |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for ranks, redundant in itertools.product(options.ranks, options.redundant):
            print(row(model, ranks, redundant, (prompts, expected), options), flush=True)


def draw(balancer: ExpertBalancer, prefix: str | None, moment: str) -> None:
    if prefix is not None:
        picture = picture_of_reply(msgspec.json.encode(balancer.report()), "the engine")
        Path(f"{prefix}-{moment}.png").write_bytes(draw_png(picture))


def sorted_by_load(balancer: ExpertBalancer) -> ExpertMap:
    """Experts in the order of their load; redundant slots at the end, as at the start."""
    current = balancer.current
    order_LE = np.argsort(-balancer.window.read().tokens_LE, axis=1, kind="stable")
    slots_LP = np.concatenate([order_LE, current.slots_LP[:, current.num_experts :]], axis=1)
    return ExpertMap(slots_LP, current.num_experts, current.num_ranks)


def row(
    model: Path,
    ranks: int,
    redundant: int,
    work: tuple[list[tuple[int, ...]], dict[int, list[int]]],
    options: argparse.Namespace,
) -> str:
    """One line of the table."""
    prompts, expected = work
    engine = Engine(model, ranks, redundant)
    try:
        engine.serve(prompts)  # warm, and measured for the plan
        if options.hottest_together:
            engine.use(sorted_by_load(engine.balancer))
            engine.balancer.window.read(clear=True)
            engine.serve(prompts)
        initial = engine.balancer.current
        before = engine.balancer.report()["balance"]
        draw(engine.balancer, options.picture, "before")
        engine.finish(engine.start())
        balanced = engine.balancer.current
        ratios: list[tuple[float, float]] = []
        waits_s: dict[bool, list[float]] = {True: [], False: []}  # by whether experts move
        for _ in range(options.rounds):
            engine.use(initial)
            answers, initial_s = engine.measure(prompts)
            waits_s[False] += engine.waits_s
            call = engine.start(slots=balanced.slots_LP.tolist())  # beside the steps that follow
            answers_while_moving, moving_s = engine.measure(prompts)
            waits_s[True] += engine.waits_s
            run = engine.finish(call)["run"]
            engine.balancer.window.read(clear=True)
            answers_after, balanced_s = engine.measure(prompts)
            assert answers == answers_while_moving == answers_after == expected, "an answer has changed"
            ratios.append((balanced_s / initial_s, moving_s / initial_s))
        after = engine.balancer.report()["balance"]
        draw(engine.balancer, options.picture, "after")
    finally:
        engine.executor.close()
    waits = {moving: np.percentile(each, [99, 100]) * 1e3 for moving, each in waits_s.items()}
    times = [
        f"x {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in zip(*ratios, strict=True)
    ]
    return (
        f"| {ranks} | {redundant} | {before['mean']:.3f} ({before['worst']:.3f}) "
        f"| {after['mean']:.3f} ({after['worst']:.3f}) "
        f"| {times[0]} | {times[1]} | {run['bytes_moved'] / 1e6:.1f} "
        f"| {statistics.mean(waits_s[True]) * 1e3:.1f}, {waits[True][0]:.1f}, {waits[True][1]:.1f} ms"
        f" ({statistics.mean(waits_s[False]) * 1e3:.1f}, {waits[False][0]:.1f}, {waits[False][1]:.1f}) |"
    )


if __name__ == "__main__":
    main()
