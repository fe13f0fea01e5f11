"""Hands a step's inputs from rank 0 to the other ranks of a group, as arrays in shared memory: nothing is encoded.

| num_tokens, num_sequences, table_width, num_logits: int64 | the arrays of StepInputs, each at a multiple of 8 bytes |
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.native import _native
from headrace.kernels.ops import StepInputs

_HEADER_BYTES = 4 * 8
StepArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def post_inputs(group: _native.Group, inputs: StepInputs) -> None:
    """Rank 0's. The others must be done with the step before, which the last barrier of that step has made sure."""
    arrays = arrays_of(inputs)
    mailbox = group.mailbox(group.posted + 1, _HEADER_BYTES + sum(map(_padded, arrays)))
    num_sequences, table_width = inputs.block_tables_SB.shape
    header = (len(inputs.token_ids_T), num_sequences, table_width, len(inputs.logit_rows_R))
    mailbox[:_HEADER_BYTES].view(np.int64)[:] = header
    at = _HEADER_BYTES
    for array in arrays:
        mailbox[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _padded(array)
    group.post()


def read_inputs(group: _native.Group, number: int) -> StepInputs:
    """What rank 0 has posted, as views that are valid during this step."""
    header = group.mailbox(number, _HEADER_BYTES).view(np.int64)
    num_tokens, num_sequences, table_width, num_logits = header.tolist()
    shapes = (
        ((num_tokens,), np.int32),
        ((num_tokens,), np.int32),
        ((num_tokens,), np.int64),
        ((num_sequences + 1,), np.int32),
        ((num_sequences,), np.int32),
        ((num_sequences, table_width), np.int32),
        ((num_logits,), np.int32),
    )
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes]
    mailbox = group.mailbox(number, _HEADER_BYTES + sum(-(-size // 8) * 8 for size in sizes))
    arrays, at = [], _HEADER_BYTES
    for (shape, dtype), size in zip(shapes, sizes, strict=True):
        arrays.append(mailbox[at : at + size].view(dtype).reshape(shape))
        at += -(-size // 8) * 8
    return StepInputs(*arrays)


def arrays_of(inputs: StepInputs) -> StepArrays:
    """What every rank needs, in the order in which a program takes it."""
    return (
        inputs.token_ids_T,
        inputs.positions_T,
        inputs.kv_slots_T,
        inputs.query_starts,
        inputs.context_lens_S,
        inputs.block_tables_SB,
        inputs.logit_rows_R,
    )


def _padded(array: np.ndarray) -> int:
    return -(-array.nbytes // 8) * 8
