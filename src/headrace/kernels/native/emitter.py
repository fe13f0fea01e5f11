"""Appends recorded ops to a program of the compiled kernels, with buffers for their values.

A buffer is handed on as soon as its value was read for the last time. What ranks exchange lies in buffers that all of
them see: each writes its columns there, and a barrier stands between the writing and the reading. Such a buffer is
handed on only behind the next barrier, because another rank may be reading it still.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.kernels.native.steps import Step, Symbol, View
from headrace.kernels.ops import RopeSpec


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
    gathers: dict[int, Step] = field(default_factory=dict)  # by the value whose columns they gather in place
    result: Step | None = None  # the last step
    offsets: dict[int, int] = field(default_factory=dict)  # first column of a value in its buffer, if it is not 0
    shared: set[int] = field(default_factory=set)  # buffers that all ranks see
    free_shared: dict[int, list[int]] = field(default_factory=dict)  # by width
    resting: dict[int, list[int]] = field(default_factory=dict)  # shared ones that are free behind the next barrier

    def rope_table(self, rope: RopeSpec) -> int:
        for known, index in self.rope_tables:
            if known is rope or (
                known.attention_scale == rope.attention_scale and np.array_equal(known.inv_freq, rope.inv_freq)
            ):
                return index
        added: int = self.program.add_rope_table([float(f) for f in rope.inv_freq], rope.attention_scale)
        self.rope_tables.append((rope, added))
        return added

    def view(self, symbol: Symbol) -> View:
        return self.buffers[symbol.value], self.offsets.get(symbol.value, 0) + symbol.offset, symbol.width

    def run(self, steps: list[Step]) -> None:
        last_read = {symbol.value: index for index, step in enumerate(steps) for symbol in step.inputs}
        self.gathers, self.result = gathers_of(steps), steps[-1]
        for index, step in enumerate(steps):
            inputs = [self.view(symbol) for symbol in step.inputs]
            is_result = index == len(steps) - 1
            buffer = self._output_buffer(step, inputs, is_result=is_result)
            self.widths.setdefault(buffer, step.output.width)
            self.buffers[step.output.value] = buffer
            out = self.view(step.output)
            if step.kind == "linear":
                self._linear(step, inputs, out, is_result)
            elif step.emit is not None:
                step.emit(self, inputs, out)
            if step.sizes is not None:
                self._exchange(step, inputs, out)
            if is_result:
                self.program.output(out) if self.program.rank == 0 else self.program.result(out)
            for value in {symbol.value for symbol in step.inputs}:
                if last_read[value] == index and value in self.buffers:
                    self._hand_on(self.buffers.pop(value), by=buffer)

    def _hand_on(self, buffer: int, by: int) -> None:
        """Nobody reads it any more, unless it has become the buffer of what was made `by` its reader."""
        if buffer != by:
            free = self.resting if buffer in self.shared else self.free
            free.setdefault(self.widths[buffer], []).append(buffer)

    def _output_buffer(self, step: Step, inputs: list[View], *, is_result: bool) -> int:
        if step.kind == "logit_rows":
            # Buffers from before hold all tokens of the step; none of them is handed on behind this point.
            self.buffers.clear()
            for free in (self.free, self.free_shared, self.resting):
                free.clear()
            self.quantized.clear()
            self.quantized_symbol.clear()
            selected: int = self.program.logit_rows(inputs[0])
            return selected
        if step.kind == "hidden":
            return inputs[0][0]
        gather = self.gathers.get(step.output.value)
        if gather is not None and gather.sizes is not None:
            # It writes its columns where all ranks' are gathered.
            self.offsets[step.output.value] = sum(gather.sizes[: self.program.rank])
            return self._shared_buffer(gather.output.width, is_result=gather is self.result)
        if step.kind == "gather" and step.inputs and step.inputs[0].value in self.gathers:
            return self.buffers[step.inputs[0].value]
        if step.sizes is not None:
            return self._shared_buffer(step.output.width, is_result=is_result)
        spare = self.free.get(step.output.width, [])
        if spare and not is_result:
            return spare.pop()
        new: int = self.program.add_buffer(step.output.width)
        return new

    def _shared_buffer(self, width: int, *, is_result: bool) -> int:
        """The result lies in the group's own memory for logits, which the caller hands in on every rank."""
        spare = self.free_shared.get(width, [])
        if spare and not is_result:
            return spare.pop()
        new: int = self.program.add_buffer(width) if is_result else self.program.add_shared_buffer(width)
        self.widths[new] = width
        self.shared.add(new)
        return new

    def _exchange(self, step: Step, inputs: list[View], out: View) -> None:
        """All ranks have written their part of `out` when this is over."""
        assert step.sizes is not None, "asked by the caller"
        if step.kind == "gather" and inputs and inputs[0][0] != out[0]:
            first = sum(step.sizes[: self.program.rank])
            self.program.scale(inputs[0], 1.0, (out[0], out[1] + first, inputs[0][2]))
        self.barrier()

    def barrier(self) -> None:
        """Behind it every rank sees what the others have written before it."""
        self.program.barrier()
        for width, buffers in self.resting.items():
            self.free_shared.setdefault(width, []).extend(buffers)
        self.resting.clear()

    def _linear(self, step: Step, inputs: list[View], out: View, is_result: bool) -> None:
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

    def _quantize(self, symbol: Symbol, view: View) -> int:
        if symbol.width not in self.quantized:
            self.quantized[symbol.width] = self.program.add_quantized(symbol.width)
        index = self.quantized[symbol.width]
        if self.quantized_symbol.get(symbol.width) != symbol:
            self.program.quantize(view, index)
            self.quantized_symbol[symbol.width] = symbol
        return index


def gathers_of(steps: list[Step]) -> dict[int, Step]:
    """Gathers of whole values that nobody else reads, by value: whoever makes such a value can write it in place."""
    readers: dict[int, int] = {}
    widths = {step.output.value: step.output.width for step in steps}
    for step in steps:
        for symbol in step.inputs:
            readers[symbol.value] = readers.get(symbol.value, 0) + 1
    return {
        step.inputs[0].value: step
        for step in steps
        if step.kind == "gather"
        and step.inputs
        and step.inputs[0].width == widths[step.inputs[0].value]
        and readers[step.inputs[0].value] == 1
    }
