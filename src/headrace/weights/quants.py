"""Turns stored numbers into float32: plain floats and ggml's block-quantised kinds, vectorised over blocks.

Called by `CheckpointTensor.dequantize`. The block layouts are those of ggml (ggml-common.h and ggml-quants.c of
github.com/ggml-org/ggml, MIT); the arithmetic keeps ggml's order, so results equal those of its reference code bit
for bit. Quantising is not done here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.weights.tensor import TensorKind

# Blocks handled at once: the temporaries of one chunk stay in the processor's cache.
CHUNK_ELEMENTS = 1 << 17

Decoder = Callable[[np.ndarray, np.ndarray], None]
"""(blocks uint8 [n, bytes per block], out float32 [n, numbers per block]) -> fills out."""


def dequantize(data: np.ndarray, kind: TensorKind) -> np.ndarray:
    """A new float32 array of all numbers in `data` (uint8, whole blocks)."""
    if kind is TensorKind.F32:
        return data.view(np.float32).copy()
    blocks = data.reshape(-1, kind.block_bytes)
    out = np.empty((blocks.shape[0], kind.block_size), np.float32)
    decode = DECODERS[kind]
    chunk = CHUNK_ELEMENTS // kind.block_size
    with np.errstate(all="ignore"):  # a corrupt scale may be NaN or infinite
        for start in range(0, blocks.shape[0], chunk):
            decode(blocks[start : start + chunk], out[start : start + chunk])
    return out.reshape(-1)


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at `offset` of each block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _decode_f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view(np.float16)


def _decode_bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    # A bfloat16 is the upper half of a float32.
    np.left_shift(blocks.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def _decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out, dtype=np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Low halves of the 16 bytes come first, then the high halves."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _decode_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:18], out)
    out -= 8
    out *= _half(blocks, 0)


def _decode_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:20], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Four bytes hold the fifth bit of 32 numbers: 16 or 0 each."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _decode_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 6:22], out)
    out += _fifth_bits(blocks[:, 2:6])
    out -= 16
    out *= _half(blocks, 0)


def _decode_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 8:24], out)
    out += _fifth_bits(blocks[:, 4:8])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twelve bytes hold eight 6-bit scales and eight 6-bit minimums of a super-block."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scale_k(blocks: np.ndarray, out_n8k: np.ndarray) -> None:
    """numbers * (d * scale) - (dmin * minimum), for each of the eight sub-blocks."""
    scales, minimums = _k_scales(blocks[:, 4:16])
    scales *= _half(blocks, 0)
    minimums *= _half(blocks, 2)
    out_n8k *= scales[:, :, None]
    out_n8k -= minimums[:, :, None]


def _decode_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    numbers = out.reshape(-1, 4, 2, 32)
    packed = blocks[:, 16:144].reshape(-1, 4, 32)
    numbers[:, :, 0] = packed & 15
    numbers[:, :, 1] = packed >> 4
    _scale_k(blocks, out.reshape(-1, 8, 32))


def _decode_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    numbers = out.reshape(-1, 4, 2, 32)
    packed = blocks[:, 48:176].reshape(-1, 4, 32)
    # Byte i of `high` holds, in bit j, the fifth bit of number i of sub-block j.
    shifted = blocks[:, 16:48][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]
    high = ((shifted & 1) << 4).reshape(-1, 4, 2, 32)
    numbers[:, :, 0] = (packed & 15) | high[:, :, 0]
    numbers[:, :, 1] = (packed >> 4) | high[:, :, 1]
    _scale_k(blocks, out.reshape(-1, 8, 32))


def _decode_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = blocks[:, 0:128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    numbers = out.reshape(-1, 2, 4, 32)
    numbers[:, :, 0] = (low[:, :, 0] & 15) | ((high & 3) << 4)
    numbers[:, :, 1] = (low[:, :, 1] & 15) | (((high >> 2) & 3) << 4)
    numbers[:, :, 2] = (low[:, :, 0] >> 4) | (((high >> 4) & 3) << 4)
    numbers[:, :, 3] = (low[:, :, 1] >> 4) | ((high >> 6) << 4)
    out -= 32
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


DECODERS: dict[TensorKind, Decoder] = {
    TensorKind.F16: _decode_f16,
    TensorKind.BF16: _decode_bf16,
    TensorKind.Q4_0: _decode_q4_0,
    TensorKind.Q4_1: _decode_q4_1,
    TensorKind.Q5_0: _decode_q5_0,
    TensorKind.Q5_1: _decode_q5_1,
    TensorKind.Q8_0: _decode_q8_0,
    TensorKind.Q4_K: _decode_q4_k,
    TensorKind.Q5_K: _decode_q5_k,
    TensorKind.Q6_K: _decode_q6_k,
}

_EXPONENTS = {
    TensorKind.F32: (np.uint32, 0x7F800000),
    TensorKind.F16: (np.uint16, 0x7C00),
    TensorKind.BF16: (np.uint16, 0x7F80),
}
_SCALES = {  # where the fp16 numbers of a block lie, in bytes
    TensorKind.Q4_0: slice(0, 2),
    TensorKind.Q4_1: slice(0, 4),
    TensorKind.Q5_0: slice(0, 2),
    TensorKind.Q5_1: slice(0, 4),
    TensorKind.Q8_0: slice(0, 2),
    TensorKind.Q4_K: slice(0, 4),
    TensorKind.Q5_K: slice(0, 4),
    TensorKind.Q6_K: slice(208, 210),
}


def has_only_finite(data: np.ndarray, kind: TensorKind) -> bool:
    """Whether no number, or no scale of a block, is NaN or infinite: such numbers have all bits of the exponent set."""
    if kind in _SCALES:
        data, kind = np.ascontiguousarray(data.reshape(-1, kind.block_bytes)[:, _SCALES[kind]]), TensorKind.F16
    dtype, exponent = _EXPONENTS[kind]
    bits: np.ndarray = data.reshape(-1).view(dtype)
    room: np.ndarray = np.empty(CHUNK_ELEMENTS, dtype)
    mask: np.ndarray = np.array(exponent, dtype)
    for start in range(0, bits.shape[0], CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS]
        if np.bitwise_and(chunk, mask, out=room[: chunk.shape[0]]).max() == mask:
            return False
    return True
