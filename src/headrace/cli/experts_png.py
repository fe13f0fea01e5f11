"""A PNG of 8-bit RGB pixels, by hand: signature, header, one zlib stream, end. No text, no library for pictures."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """`pixels`: [height, width, 3]."""
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, the one compression, not interlaced
    filters = np.zeros((height, 1), dtype=np.uint8)  # each row starts with its filter: none
    rows = np.hstack([filters, pixels.reshape(height, width * 3)])
    body = zlib.compress(rows.tobytes(), 9)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
