"""What a layer of experts costs per step, against how many of them its rows use and how many exist.

    python bench/experts.py --hidden 1024 --inner 384 --kind w4

Random weights, no attention: the program is layers of experts alone, as many as share one fixed number of experts
among them, so that memory is the same in each line. With `even` routing each row of a step chooses its own 8 experts of
E, with `same` routing all choose the same 8. Every step chooses others than the one before, so that weights come from
memory.
`ms` is the median time of a layer, `us/used` that time per expert that was used, `GB/s` the rate at which their weights
were read, and `share` that rate in what as many threads can read at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.kernels.native import _native
from headrace.kernels.native.backend import NativeBackend
from headrace.kernels.ops import MoeSpec, Ops, RoutingSpec, StepInputs, Tensor
from headrace.testing.op_models import OpModel, float_tensor, step_of

PER_TOKEN = 8
TABLE_ROWS = 1024
"""Rows that steps choose from."""


@dataclass(frozen=True)
class Result:
    """Of one layer in one step, the median of several."""

    layer_s: float
    num_used: float


class Bench:
    """Experts that differ in where they lie, not in what they hold, which is quicker to make."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.hidden, self.inner, self.seconds = options.hidden, options.inner, options.seconds
        self.rng = np.random.default_rng(0)
        self.backend = NativeBackend(options.threads, None if options.kind == "f32" else options.kind)
        packer, floats = self.backend.packer(), NativeBackend(1).packer()
        parts = [self._weight(self.inner, self.hidden) for _ in range(2)]
        down = self._weight(self.hidden, self.inner)
        self.experts = [
            (packer.pack_linear(parts), packer.pack_linear([down])) for _ in range(max(options.experts) * 3)
        ]
        self.expert_bytes = sum(part.num_bytes for weight in self.experts[0] for part in weight.parts)
        self.pack_table: Callable[[np.ndarray], Any] = lambda values: floats.pack_table(float_tensor(values))

    def _weight(self, rows: int, cols: int) -> Any:
        return float_tensor((self.rng.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32))

    def measure(self, num_experts: int, num_rows: int, has_same_routing: bool) -> Result:
        num_layers = len(self.experts) // num_experts
        x = self.rng.standard_normal((TABLE_ROWS, self.hidden)).astype(np.float32)
        scores = self.rng.standard_normal((TABLE_ROWS, num_layers * num_experts)).astype(np.float32)
        if has_same_routing:
            scores = scores[np.arange(TABLE_ROWS) // num_rows]
        table = self.pack_table(np.concatenate([x, scores], axis=1))
        layers = [self.backend.experts(num_experts) for _ in range(num_layers)]
        for i, layer in enumerate(layers):
            layer.place(np.arange(num_experts), dict(enumerate(self.experts[i * num_experts : (i + 1) * num_experts])))
        routing = RoutingSpec(num_experts=num_experts, num_per_token=PER_TOKEN)
        spec = MoeSpec(routing=routing, activation="silu", inner_size=self.inner)

        def forward(ops: Ops, layers: list[Any]) -> Tensor:
            x, *of_layers = ops.split(ops.embed(table), (self.hidden, *[num_experts] * num_layers))
            for layer, scores in zip(layers, of_layers, strict=False):
                x = ops.moe(x, scores, None, layer, spec)
            return ops.logit_rows(x)

        whole, empty = OpModel(lambda ops: forward(ops, layers)), OpModel(lambda ops: forward(ops, []))
        inputs = step_of(num_rows, [0])
        self.backend.allocate_kv(whole.kv_spec, -(-num_rows // 16), 16)
        empty_s, _ = self._median(empty, inputs, [])
        whole_s, num_used = self._median(whole, inputs, layers)
        return Result((whole_s - empty_s) / num_layers, num_used)

    def _median(self, model: OpModel, inputs: StepInputs, layers: list[Any]) -> tuple[float, float]:
        num_rows = len(inputs.token_ids_T)
        times, used = [], []
        end_s = time.perf_counter() + self.seconds
        for step in range(1000):
            first = step * num_rows % TABLE_ROWS
            inputs = dataclasses.replace(inputs, token_ids_T=np.arange(first, first + num_rows, dtype=np.int32))
            begin_s = time.perf_counter()
            self.backend.run(model, inputs)
            times.append(time.perf_counter() - begin_s)
            used += [int((layer.take_counts() > 0).sum()) for layer in layers]
            if step >= 4 and time.perf_counter() > end_s:
                break
        return statistics.median(times[1:]), statistics.mean(used) if used else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--kind", choices=["w4", "w8", "f32"], default="w4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each line")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    read_bytes_per_s, _ = _native.measure_limits(_native.Pool(options.threads, False))
    bench = Bench(options)
    print(
        f"{options.kind}, D {bench.hidden}, F {bench.inner}, {options.threads} threads, {PER_TOKEN} experts per token,",
        end=" ",
    )
    print(f"{bench.expert_bytes / 1e6:.2f} MB each; memory reads {read_bytes_per_s / 1e9:.1f} GB/s")
    print(f"{'routing':>8} {'rows':>5} {'exist':>6} {'used':>6} {'ms':>8} {'us/used':>8} {'GB/s':>6} {'share':>6}")
    for name in ("even", "same"):
        for num_rows in options.rows:
            for num_experts in options.experts:
                result = bench.measure(num_experts, num_rows, name == "same")
                rate = result.num_used * bench.expert_bytes / result.layer_s
                print(
                    f"{name:>8} {num_rows:5d} {num_experts:6d} {result.num_used:6.1f} {result.layer_s * 1e3:8.3f}"
                    f" {result.layer_s * 1e6 / result.num_used:8.1f} {rate / 1e9:6.1f} {rate / read_bytes_per_s:6.2f}"
                )


if __name__ == "__main__":
    main()
