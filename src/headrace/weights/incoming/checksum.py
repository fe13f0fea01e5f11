"""Checksums by which a trainer and a server agree that they hold the same weights.

BLAKE2b with 16 bytes: it is in the standard library of every trainer's Python, hashes 0.5 to 1 GB/s on one core without
special instructions (SHA-256 needs them for that), lets other threads run meanwhile, and 128 bits leave no room for
chance. The same numbers in another dtype have another checksum: bytes are compared, not values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from headrace.weights.tensor import CheckpointTensor

DIGEST_BYTES = 16


def tensor_checksum(tensor: CheckpointTensor) -> str:
    """32 hex digits over kind, shape and bytes; the name does not count, so that renaming keeps it."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    # Kind and shape end in a zero byte, which neither holds: no two tensors feed the same bytes.
    digest.update(f"{tensor.kind.label} {','.join(map(str, tensor.shape))}\0".encode())
    digest.update(tensor.data.data)
    return digest.hexdigest()


def total_checksum(tensors: Mapping[str, CheckpointTensor]) -> str:
    """32 hex digits over the names, sorted, and the checksum of each tensor: the order of arrival does not count."""
    return total_of({name: tensor_checksum(tensor) for name, tensor in tensors.items()})


def total_of(checksums: Mapping[str, str]) -> str:
    """The same, of checksums by name."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(checksums):
        text = name.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(4, "little") + text + checksums[name].encode())
    return digest.hexdigest()
