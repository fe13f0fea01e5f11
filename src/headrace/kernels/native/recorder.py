"""Turns one run of a model's forward function into a program of the compiled kernels.

`record()` calls the model with symbolic tensors, fuses a residual addition into the linear layer before it
(`steps.py`), and has the commands appended (`emitter.py`). `backend.py` calls it, once per model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.kernels.native import _native
from headrace.kernels.native.emitter import Emitter
from headrace.kernels.native.experts import NativeExperts, native_routing
from headrace.kernels.native.steps import StackedWeight, Step, Symbol, View, fuse_residuals
from headrace.kernels.ops import AttentionSpec, Experts, Model, MoeSpec, RopeSpec


class Recorder:
    """`Ops` over symbols: notes each call and answers with the shape of its result."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.hidden_size = 0
        self._num_values = 0

    def _new(self, width: int, heads: int = 1) -> Symbol:
        self._num_values += 1
        return Symbol(self._num_values - 1, 0, width, heads)

    def _like(self, x: Symbol) -> Symbol:
        return self._new(x.width, x.heads)

    def _note(self, kind: str, inputs: Sequence[Symbol], output: Symbol, emit: Any, **extra: Any) -> Symbol:
        self.steps.append(Step(kind, tuple(inputs), output, emit, **extra))
        return output

    def embed(self, table: StackedWeight, first_row: int | None = None) -> Symbol:
        weight = table.parts[0]
        out = self._new(weight.cols)
        sizes = None if first_row is None else (weight.cols,)
        return self._note("embed", (), out, lambda e, _, y: e.program.embed(weight, first_row or 0, y), sizes=sizes)

    def gather(self, x: Symbol | None, sizes: tuple[int, ...]) -> Symbol:
        return self._note("gather", () if x is None else (x,), self._new(sum(sizes)), None, sizes=sizes)

    def scale(self, x: Symbol, factor: float) -> Symbol:
        return self._note("scale", (x,), self._like(x), lambda e, i, y: e.program.scale(i[0], factor, y))

    def add(self, x: Symbol, y: Symbol) -> Symbol:
        return self._note("add", (x, y), self._like(x), lambda e, i, out: e.program.add(i[0], i[1], out))

    def rms_norm(self, x: Symbol, weight: np.ndarray, eps: float) -> Symbol:
        assert x.width == x.heads * len(weight), "the norm's weight has the length of what it norms"
        out = self._like(x)
        return self._note("norm", (x,), out, lambda e, i, y: e.program.rms_norm(i[0], x.heads, weight, eps, y))

    def linear(self, x: Symbol, weight: StackedWeight) -> Symbol:
        assert all(part.cols == x.width for part in weight.parts), "the weight has an input per number of x"
        out = self._new(weight.num_outputs)
        return self._note("linear", (x,), out, None, weight=weight)

    def split(self, x: Symbol, sizes: tuple[int, ...]) -> tuple[Symbol, ...]:
        starts = np.cumsum((0, *sizes[:-1]))
        return tuple(Symbol(x.value, x.offset + int(at), size) for at, size in zip(starts, sizes, strict=True))

    def heads(self, x: Symbol, num_heads: int) -> Symbol:
        return replace(x, heads=num_heads)

    def rope(self, x: Symbol, rope: RopeSpec) -> Symbol:
        def emit(e: Emitter, i: list[View], y: View) -> None:
            rotary = 2 * len(rope.inv_freq)
            e.program.rope(i[0], x.heads, e.rope_table(rope), rotary, rope.is_interleaved, y)

        return self._note("rope", (x,), self._like(x), emit)

    def attention(self, q: Symbol, k: Symbol, v: Symbol, layer: int, spec: AttentionSpec) -> Symbol:
        variant = (spec.num_heads, spec.scale, spec.soft_cap or 0.0, spec.sliding_window or 0)
        return self._note(
            "attention", (q, k, v), self._new(q.width), lambda e, i, y: e.program.attention(*i, layer, *variant, y)
        )

    def gated(self, gate: Symbol, up: Symbol, activation: str) -> Symbol:
        kind = getattr(_native.Activation, activation)
        return self._note("gated", (gate, up), self._like(gate), lambda e, i, y: e.program.gated(*i, kind, y))

    def moe(self, x: Symbol, scores: Symbol, bias: np.ndarray | None, experts: Experts, spec: MoeSpec) -> Symbol:
        assert isinstance(experts, NativeExperts), "experts of the same backend"
        routing = native_routing(spec.routing)
        activation = getattr(_native.Activation, spec.activation)
        sizes = (spec.inner_size, list(spec.inner_sizes), list(spec.output_sizes))
        return self._note(
            "moe",
            (x, scores),
            self._like(x),
            lambda e, i, y: e.program.moe(*i, experts.table, routing, bias, activation, *sizes, y),
        )

    def gate_rows(self, x: Symbol, gate: Symbol) -> Symbol:
        return self._note("gate_rows", (x, gate), self._like(x), lambda e, i, y: e.program.gate_rows(*i, y))

    def hidden_rows(self, x: Symbol, weight: np.ndarray, eps: float) -> None:
        """It makes no value: what it gives goes into the caller's memory."""
        self.hidden_size = x.width
        self._note("hidden", (x,), x, lambda e, i, _: e.program.hidden(i[0], weight, eps))

    def logit_rows(self, x: Symbol) -> Symbol:
        return self._note("logit_rows", (x,), self._like(x), None)

    def soft_cap(self, x: Symbol, cap: float) -> Symbol:
        return self._note("soft_cap", (x,), self._like(x), lambda e, i, y: e.program.soft_cap(i[0], cap, y))


def record(model: Model, program: Any) -> tuple[int, int]:
    """Appends the model's forward pass to an empty program; returns the widths of its results: vocabulary, and hidden
    states or 0."""
    recorder = Recorder()
    logits = model.forward(recorder)
    assert any(step.kind == "logit_rows" for step in recorder.steps), "a model ends on the rows that are wanted"
    assert logits == recorder.steps[-1].output, "the last op makes the result"
    Emitter(program).run(fuse_residuals(recorder.steps))
    return logits.width, recorder.hidden_size
