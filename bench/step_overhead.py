"""What a decode step costs beside the model itself: schedule, batch, sample, update, encode for the wire.

    python bench/step_overhead.py --streams 16 --steps 200 --temperature 0.8

The engine's core runs in this process; the time inside the backend's forward pass is taken off. Median per step, in ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.transport import codec
from headrace.transport.messages import Submit
from headrace.types import RequestId, SamplingParams
from headrace.weights.hub import resolve_model


class TimedBackend:
    """A backend that remembers how long its forward passes took."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.forward_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, model: Any, inputs: Any) -> Any:
        begin = time.perf_counter()
        outputs = self._backend.run(model, inputs)
        self.forward_s += time.perf_counter() - begin
        return outputs


def measure(model_file: Path, num_streams: int, num_steps: int, temperature: float) -> tuple[list[float], list[float]]:
    """Milliseconds per step: beside the model, and in the model."""
    backend = TimedBackend(create_backend("auto"))
    core = EngineCore(
        UniprocExecutor(model_file, backend),  # type: ignore[arg-type]
        CacheConfig(kv_cache_memory="1GiB"),
        SchedulerConfig(max_num_seqs=max(64, num_streams)),
        2048,
    )
    params = SamplingParams(max_tokens=num_steps + 32, temperature=temperature, ignore_eos=True, seed=0)
    for i in range(num_streams):
        prompt = tuple(np.random.default_rng(i).integers(0, core.info.vocab_size, 16).tolist())
        core.submit(0, Submit(request_id=RequestId(i), public_id=str(i), prompts=(prompt,), params=params))
    for _ in range(16):
        core.step()
    beside, within = [], []
    for _ in range(num_steps):
        backend.forward_s = 0.0
        begin = time.perf_counter()
        for outputs in core.step().values():
            codec.encode(outputs)
        total = time.perf_counter() - begin
        beside.append(1000 * (total - backend.forward_s))
        within.append(1000 * backend.forward_s)
    return beside, within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    beside, within = measure(resolve_model(args.model).path, args.streams, args.steps, args.temperature)
    low, high = np.percentile(beside, [10, 90])
    print(f"{args.streams} streams: beside the model {statistics.median(beside):.3f} ms per step "
          f"(p10 {low:.3f}, p90 {high:.3f}); in the model {statistics.median(within):.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
