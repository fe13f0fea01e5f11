"""Turns one run of a model's forward function into a program of the compiled kernels.

`record()` calls the model with symbolic tensors, then fuses a residual addition into the linear layer before it, gives
tensors buffers that are reused once nobody reads them any more, and appends the commands. `backend.py` calls it, once
per model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.kernels.native import _native
from headrace.kernels.ops import AttentionSpec, Model, RopeSpec


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Checkpoint tensors stacked along their outputs, each packed on its own, so their kinds may differ."""

    parts: tuple[Any, ...]  # _native.Weight
    biases: tuple[np.ndarray | None, ...]

    @property
    def num_outputs(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def is_quantized(self) -> bool:
        return any(part.is_quantized for part in self.parts)


@dataclass(frozen=True, slots=True)
class Symbol:
    """Columns [offset, offset + width) of a value, seen as `heads` heads."""

    value: int
    offset: int
    width: int
    heads: int = 1


@dataclass(slots=True)
class Step:
    """One recorded op: which values it reads, which one it makes, and how to append it once these have buffers."""

    kind: str
    inputs: tuple[Symbol, ...]
    output: Symbol
    emit: Callable[[Emitter, list[tuple[int, int, int]], tuple[int, int, int]], None] | None
    weight: StackedWeight | None = None
    residual: Symbol | None = None


class Recorder:
    """`Ops` over symbols: notes each call and answers with the shape of its result."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._num_values = 0

    def _new(self, width: int, heads: int = 1) -> Symbol:
        self._num_values += 1
        return Symbol(self._num_values - 1, 0, width, heads)

    def _like(self, x: Symbol) -> Symbol:
        return self._new(x.width, x.heads)

    def _note(self, kind: str, inputs: Sequence[Symbol], output: Symbol, emit: Any, **extra: Any) -> Symbol:
        self.steps.append(Step(kind, tuple(inputs), output, emit, **extra))
        return output

    def embed(self, table: StackedWeight) -> Symbol:
        weight = table.parts[0]
        out = self._new(weight.cols)
        return self._note("embed", (), out, lambda e, _, y: e.program.embed(weight, y))

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
        def emit(e: Emitter, i: list[tuple[int, int, int]], y: tuple[int, int, int]) -> None:
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

    def logit_rows(self, x: Symbol) -> Symbol:
        return self._note("logit_rows", (x,), self._like(x), None)

    def soft_cap(self, x: Symbol, cap: float) -> Symbol:
        return self._note("soft_cap", (x,), self._like(x), lambda e, i, y: e.program.soft_cap(i[0], cap, y))


def fuse_residuals(steps: list[Step]) -> list[Step]:
    """x + linear(y) becomes one command, where that is all that is done with the linear layer's result."""
    readers: dict[int, int] = {}
    for step in steps:
        for symbol in step.inputs:
            readers[symbol.value] = readers.get(symbol.value, 0) + 1
    fused: list[Step] = []
    for step in steps:
        last = fused[-1] if fused else None
        if (
            step.kind == "add"
            and last is not None
            and last.kind == "linear"
            and last.residual is None
            and step.inputs[1].value == last.output.value
            and step.inputs[1].width == last.output.width
            and readers[last.output.value] == 1
        ):
            fused[-1] = replace(
                last, inputs=(*last.inputs, step.inputs[0]), residual=step.inputs[0], output=step.output
            )
        else:
            fused.append(step)
    return fused


@dataclass(slots=True)
class Emitter:
    """Appends steps to a program, with buffers that are handed on as soon as their value was read for the last time."""

    program: Any
    buffers: dict[int, int] = field(default_factory=dict)  # of live values
    widths: dict[int, int] = field(default_factory=dict)  # of buffers
    free: dict[int, list[int]] = field(default_factory=dict)  # by width
    quantized: dict[int, int] = field(default_factory=dict)  # buffer of quantised rows, by width
    quantized_symbol: dict[int, Symbol] = field(default_factory=dict)  # what lies in it
    rope_tables: list[tuple[RopeSpec, int]] = field(default_factory=list)

    def rope_table(self, rope: RopeSpec) -> int:
        for known, index in self.rope_tables:
            if known is rope or (
                known.attention_scale == rope.attention_scale and np.array_equal(known.inv_freq, rope.inv_freq)
            ):
                return index
        added: int = self.program.add_rope_table([float(f) for f in rope.inv_freq], rope.attention_scale)
        self.rope_tables.append((rope, added))
        return added

    def view(self, symbol: Symbol) -> tuple[int, int, int]:
        return (self.buffers[symbol.value], symbol.offset, symbol.width)

    def run(self, steps: list[Step]) -> None:
        last_read = {symbol.value: index for index, step in enumerate(steps) for symbol in step.inputs}
        for index, step in enumerate(steps):
            inputs = [self.view(symbol) for symbol in step.inputs]
            is_result = index == len(steps) - 1
            buffer = self._output_buffer(step, inputs, is_result)
            self.widths[buffer] = step.output.width
            self.buffers[step.output.value] = buffer
            out = self.view(step.output)
            if step.kind == "linear":
                self._linear(step, inputs, out, is_result)
            elif step.emit is not None:
                step.emit(self, inputs, out)
            if is_result:
                self.program.output(out)
            for value in {symbol.value for symbol in step.inputs}:
                if last_read[value] == index and value in self.buffers:
                    buffer = self.buffers.pop(value)
                    self.free.setdefault(self.widths[buffer], []).append(buffer)

    def _output_buffer(self, step: Step, inputs: list[tuple[int, int, int]], is_result: bool) -> int:
        if step.kind == "logit_rows":
            # Buffers from before hold all tokens of the step; none of them is handed on behind this point.
            self.buffers.clear()
            self.free.clear()
            self.quantized.clear()
            self.quantized_symbol.clear()
            selected: int = self.program.logit_rows(inputs[0])
            return selected
        spare = self.free.get(step.output.width, [])
        if spare and not is_result:
            return spare.pop()
        new: int = self.program.add_buffer(step.output.width)
        return new

    def _linear(
        self, step: Step, inputs: list[tuple[int, int, int]], out: tuple[int, int, int], is_result: bool
    ) -> None:
        weight = step.weight
        assert weight is not None, "a linear step has a weight"
        index = self._quantize(step.inputs[0], inputs[0]) if weight.is_quantized else -1
        if is_result and len(weight.parts) == 1 and step.residual is None:
            self.program.head(inputs[0], index, weight.parts[0], weight.biases[0], out)
            return
        parts, offset = [], 0
        for part in weight.parts:
            parts.append((part, offset))
            offset += part.rows
        residual = self.view(step.residual) if step.residual is not None else (-1, 0, 0)
        self.program.linear(inputs[0], index, parts, list(weight.biases), residual, out)

    def _quantize(self, symbol: Symbol, view: tuple[int, int, int]) -> int:
        if symbol.width not in self.quantized:
            self.quantized[symbol.width] = self.program.add_quantized(symbol.width)
        index = self.quantized[symbol.width]
        if self.quantized_symbol.get(symbol.width) != symbol:
            self.program.quantize(view, index)
            self.quantized_symbol[symbol.width] = symbol
        return index


def record(model: Model, program: Any) -> int:
    """Appends the model's forward pass to an empty program; returns the width of its result, the vocabulary."""
    recorder = Recorder()
    logits = model.forward(recorder)
    assert any(step.kind == "logit_rows" for step in recorder.steps), "a model ends on the rows that are wanted"
    assert logits == recorder.steps[-1].output, "the last op makes the result"
    Emitter(program).run(fuse_residuals(recorder.steps))
    width: int = logits.width
    return width
