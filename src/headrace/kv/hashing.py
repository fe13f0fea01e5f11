"""Names of KV blocks: a chain of hashes over token ids that starts at a typed key.

hash[0] = H(H(key), tokens of block 0), hash[i] = H(hash[i-1], tokens of block i). Equal hashes mean equal tokens from
the first on *and* equal keys, so a block can be found by its hash alone. Used by the manager and by whoever feeds it a
sequence; knows no block memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from headrace.types import BlockHash

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class CacheKey:
    """All besides the tokens that decides what lies in a block; two sequences share blocks only if it is all equal."""

    weights_epoch: int = 0
    adapter: str | None = None
    cache_salt: str | None = None
    mm_hashes: tuple[bytes, ...] = ()
    private_to: int | None = None  # number of the one request that may reuse these blocks (prefix caching is off)

    def digest(self) -> BlockHash:
        """The parent of a chain's first block. Msgpack keeps field borders and types, so no two keys encode alike."""
        fields = (self.weights_epoch, self.adapter, self.cache_salt, self.mm_hashes, self.private_to)
        return BlockHash(blake2b(msgspec.msgpack.encode(fields), digest_size=DIGEST_BYTES).digest())


class HashChain:
    """The hashes of one sequence's full blocks, computed once and only as far as asked."""

    __slots__ = ("_last", "block_size", "hashes", "key")

    def __init__(self, key: CacheKey, block_size: int) -> None:
        self.key = key
        self.block_size = block_size
        self.hashes: list[BlockHash] = []
        self._last = key.digest()

    @property
    def num_tokens(self) -> int:
        """Tokens that are hashed already: the next `extend` starts behind them."""
        return len(self.hashes) * self.block_size

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hashes the full blocks of the tokens that follow the hashed ones; an incomplete block is left for later."""
        size = self.block_size
        if len(token_ids) < size:
            return
        data = memoryview(array("I", token_ids)).cast("B")
        block_bytes = size * 4
        last = self._last
        for start in range(0, len(data) - block_bytes + 1, block_bytes):
            last = BlockHash(
                blake2b(last + bytes(data[start : start + block_bytes]), digest_size=DIGEST_BYTES).digest()
            )
            self.hashes.append(last)
        self._last = last

    def fork(self, num_blocks: int) -> HashChain:
        """A chain of its own for a sequence with the same key whose first `num_blocks` full blocks are the same."""
        copy = HashChain(self.key, self.block_size)
        copy.hashes = self.hashes[:num_blocks]
        if copy.hashes:
            copy._last = copy.hashes[-1]
        return copy
