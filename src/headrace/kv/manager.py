"""KV memory of an engine, by sequence: find what is cached, take blocks, register computed ones, give them back.

The scheduler calls it, on the core's thread, and holds one `BlockTable` per running sequence. It decides nothing about
who may run: when memory is short it says so and changes nothing. README.md draws who owns what.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.kv.blocks import BlockPool
from headrace.kv.hashing import CacheKey, HashChain
from headrace.kv.radix import PrefixIndex
from headrace.types import BlockId


class BlockTable:
    """The blocks that one sequence owns, first token first. Made by `KVManager.allocate`, ended by `release`."""

    __slots__ = ("block_ids", "chain", "is_registering", "num_cached_tokens", "num_registered")

    def __init__(self, chain: HashChain | None, block_ids: list[BlockId], num_cached: int, block_size: int) -> None:
        self.chain = chain
        self.block_ids = block_ids
        self.num_cached_tokens = num_cached * block_size
        self.num_registered = num_cached  # leading blocks that the index knows
        self.is_registering = chain is not None


class KVManager:
    """One pool and one prefix index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._weights_epoch = 0
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now: those that hold nothing, and cached ones without an owner."""
        return self._pool.num_free + self._index.num_evictable

    @property
    def num_cached(self) -> int:
        return len(self._index)

    @property
    def weights_epoch(self) -> int:
        return self._weights_epoch

    def set_weights_epoch(self, epoch: int) -> None:
        """New weights: nothing cached so far is found again, and tables that are in use register nothing more."""
        self._weights_epoch = epoch
        self.reset()

    def cache_key(self, *, cache_salt: str | None = None, private_to: int | None = None) -> CacheKey:
        """The key of a sequence that starts now."""
        return CacheKey(weights_epoch=self._weights_epoch, cache_salt=cache_salt, private_to=private_to)

    def allocate(
        self, chain: HashChain | None, num_tokens: int, max_cached_tokens: int, num_spare: int = 0
    ) -> BlockTable | None:
        """Blocks for `num_tokens` tokens of a new table, the longest cached prefix first.

        `max_cached_tokens` bounds what may come from the cache. None, with nothing changed, if this would leave fewer
        than `num_spare` blocks free. A chain of an earlier weights epoch must not come here.
        """
        size = self.block_size
        cached: list[BlockId] = []
        if chain is not None:
            assert chain.key.weights_epoch == self._weights_epoch, "a chain of other weights"
            cached = self._index.match(chain.hashes, max_cached_tokens // size)
        num_new = (num_tokens + size - 1) // size - len(cached)
        num_revived = sum(map(self._index.is_evictable, cached))
        if num_new + num_revived + num_spare > self.num_free:
            return None
        for block in cached:
            if self._pool.acquire(block) == 1:
                self._index.mark_used(block)
        table = BlockTable(chain, cached, len(cached), size)
        table.block_ids.extend(self._take() for _ in range(num_new))
        return table

    def append(self, table: BlockTable) -> BlockId:
        """One more block at the end of a table. The caller has made sure that one is free."""
        block = self._take()
        table.block_ids.append(block)
        return block

    def register(self, table: BlockTable, num_full: int) -> None:
        """The first `num_full` blocks of a table are computed to their last token: others may find them now."""
        chain = table.chain
        if chain is None or chain.key.weights_epoch != self._weights_epoch:
            table.is_registering = False
        if not table.is_registering:
            return
        assert chain is not None
        assert len(chain.hashes) >= num_full, "register before the chain has the hashes"
        for i in range(table.num_registered, num_full):
            parent = chain.hashes[i - 1] if i else None
            if not self._index.insert(chain.hashes[i], table.block_ids[i], parent):
                table.is_registering = False  # the cache was reset below this table
                return
        table.num_registered = max(table.num_registered, num_full)

    def release(self, table: BlockTable, *, forget: bool = False) -> None:
        """Gives all blocks back; the table is empty afterwards. With `forget` their content leaves the index too."""
        if forget:
            for block in table.block_ids[: table.num_registered]:
                self._free_all(self._index.forget(block))
        for block in reversed(table.block_ids):  # last first: leaves must be evicted before their parents
            if self._pool.drop(block) == 0 and not self._index.mark_unused(block):
                self._pool.free(block)
        table.block_ids = []
        table.is_registering = False

    def reset(self) -> int:
        """Drops the prefix index; blocks in use stay with their owners. Returns how many blocks it held."""
        num_dropped = len(self._index)
        self._free_all(self._index.clear())
        return num_dropped

    def _take(self) -> BlockId:
        if not self._pool.num_free:
            self._free_all(self._index.evict())
        return self._pool.take()

    def _free_all(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._pool.free(block)

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Given every live table: each block is owned as often as it is listed, or free, or cached."""
        owners: dict[BlockId, int] = {}
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), "a table lists a block twice"
            for block in table.block_ids:
                owners[block] = owners.get(block, 0) + 1
        self._index.check_invariants()
        self._pool.check_invariants(owners, self._index.evictable_blocks())
