"""The numpy backend's ops: one instance per step, each call computes at once.

Made by `ReferenceBackend.run`. Sums and transcendental functions go through the `Arithmetic`; what is left here is one
correctly rounded operation per element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.kernels.ops import AttentionSpec, Experts, MoeSpec, RopeSpec, StepInputs
from headrace.kernels.reference.arithmetic import Arithmetic, Floats, Matrix, first_visible
from headrace.kernels.reference.experts import ReferenceExperts
from headrace.kernels.reference.functions import ACTIVATIONS, sigmoid
from headrace.kernels.reference.memory import PagedKV, RopeTables
from headrace.kernels.reference.routing import choose_experts


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of the step: its rows of T, and the tokens of its context that they can see."""

    start: int
    end: int
    first_position: int
    context_len: int
    table_B: np.ndarray


class ReferenceOps:
    """Implements `Ops`."""

    def __init__(self, arithmetic: Arithmetic, kv: PagedKV, ropes: RopeTables, inputs: StepInputs) -> None:
        self._arithmetic = arithmetic
        self._kv = kv
        self._ropes = ropes
        self._inputs = inputs
        self._rope_rows: dict[int, tuple[Floats, Floats]] = {}
        self._places: dict[int | None, list[slice | np.ndarray]] = {}
        self._sequences = _sequences(inputs)
        self.hidden_UD: Floats | None = None

    def embed(self, table: Matrix, first_row: int | None = None) -> Floats:
        assert first_row is None, "one rank has the whole table"
        return self._arithmetic.rows(table.data, self._inputs.token_ids_T)

    def scale(self, x: Floats, factor: float) -> Floats:
        return x * np.float32(factor)

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        mean = self._arithmetic.sum_squares(x)
        mean *= np.float32(1 / x.shape[-1])
        mean += np.float32(eps)
        np.sqrt(mean, out=mean)
        out = x / mean
        out *= weight
        return out

    def linear(self, x: Floats, weight: Matrix) -> Floats:
        out = self._arithmetic.linear(x, weight.data)
        if weight.bias_O is not None:
            out += weight.bias_O
        return out

    def split(self, x: Floats, sizes: tuple[int, ...]) -> tuple[Floats, ...]:
        parts, start = [], 0
        for size in sizes:
            parts.append(x[..., start : start + size])
            start += size
        return tuple(parts)

    def heads(self, x: Floats, num_heads: int) -> Floats:
        return x.reshape(x.shape[0], num_heads, -1)

    def rope(self, x_THK: Floats, rope: RopeSpec) -> Floats:
        rows = self._rope_rows.get(id(rope))
        if rows is None:
            rows = self._rope_rows[id(rope)] = self._ropes.rows(rope, self._inputs.positions_T)
        cos, sin = rows
        half = cos.shape[-1]
        out = np.empty(x_THK.shape, np.float32)
        if rope.is_interleaved:
            low, high = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            low, high = slice(0, half), slice(half, 2 * half)
        x, y = x_THK[..., low], x_THK[..., high]
        np.subtract(x * cos, y * sin, out=out[..., low])
        np.add(y * cos, x * sin, out=out[..., high])
        if 2 * half < x_THK.shape[-1]:
            out[..., 2 * half :] = x_THK[..., 2 * half :]
        return out

    def attention(self, q_THK: Floats, k_TGK: Floats, v_TGK: Floats, layer: int, spec: AttentionSpec) -> Floats:
        kv = self._kv
        kv.store(layer, self._inputs.kv_slots_T, k_TGK, v_TGK)
        out = np.empty((q_THK.shape[0], spec.num_heads * spec.head_dim), np.float32)
        for sequence, places in zip(self._sequences, self._visible(spec.sliding_window), strict=True):
            first = first_visible(sequence.first_position, spec.sliding_window)
            rows = slice(sequence.start, sequence.end)
            offset = sequence.first_position - first
            out[rows] = self._arithmetic.attend(q_THK[rows], kv.k[layer, places], kv.v[layer, places], offset, spec)
        return out

    def _visible(self, window: int | None) -> list[slice | np.ndarray]:
        """Per sequence, where the KV lies that its rows can see; the same for all layers with this window."""
        if window not in self._places:
            self._places[window] = [
                self._kv.places(s.table_B, first_visible(s.first_position, window), s.context_len)
                for s in self._sequences
            ]
        return self._places[window]

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        out = self._arithmetic.apply(ACTIVATIONS[activation], gate)
        out *= up
        return out

    def moe(self, x: Floats, scores_TE: Floats, bias_E: Floats | None, experts: Experts, spec: MoeSpec) -> Floats:
        assert isinstance(experts, ReferenceExperts), "of the same backend"
        assert not spec.inner_sizes, "one rank has experts whole"
        chosen_TC, weights_TC = choose_experts(self._arithmetic, scores_TE, bias_E, spec.routing)
        slots_TC = experts.slots(chosen_TC, self._inputs.positions_T)
        out_TCD = np.empty((*chosen_TC.shape, x.shape[-1]), np.float32)
        for slot in np.unique(slots_TC).tolist():
            gate_up, down = experts.held[slot]
            rows, choices = np.nonzero(slots_TC == slot)
            gate, up = self.split(self.linear(x[rows], gate_up), (spec.inner_size, spec.inner_size))
            out_TCD[rows, choices] = self.linear(self.gated(gate, up, spec.activation), down)
        out_TCD *= weights_TC[:, :, None]
        out: Floats = out_TCD[:, 0].copy()
        for choice in range(1, out_TCD.shape[1]):
            out += out_TCD[:, choice]
        return out

    def gate_rows(self, x: Floats, gate_T1: Floats) -> Floats:
        return x * self._arithmetic.apply(sigmoid, gate_T1)

    def gather(self, x: Floats | None, sizes: tuple[int, ...]) -> Floats:
        assert x is not None, "one rank has it all"
        return x

    def hidden_rows(self, x: Floats, weight: Floats, eps: float) -> None:
        if self._inputs.hidden_rows_U is not None:
            self.hidden_UD = self.rms_norm(x[self._inputs.hidden_rows_U], weight, eps)

    def logit_rows(self, x: Floats) -> Floats:
        rows: Floats = x[self._inputs.logit_rows_R]
        return rows

    def soft_cap(self, x: Floats, cap: float) -> Floats:
        out = self._arithmetic.apply(np.tanh, x / np.float32(cap))
        out *= np.float32(cap)
        return out


def _sequences(inputs: StepInputs) -> list[SequenceRows]:
    starts = inputs.query_starts.tolist()
    lengths = inputs.context_lens_S.tolist()
    return [
        SequenceRows(start, end, length - (end - start), length, inputs.block_tables_SB[s])
        for s, (start, end, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True))
        if end > start
    ]
