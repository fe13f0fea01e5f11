"""The block pool: which KV blocks are in use, and by how many owners. Used by the manager alone.

It counts references and keeps the list of blocks that hold nothing. A block without an owner that still holds a cached
prefix is in neither: the prefix index keeps it until it is evicted (see README.md). It knows no tokens.
"""

from __future__ import annotations

from headrace.types import BlockId


class BlockPool:
    """`num_blocks` blocks with reference counts; blocks that were never used are handed out in rising order."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool without blocks"
        self.num_blocks = num_blocks
        self._refcounts = [0] * num_blocks
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, block: BlockId) -> int:
        return self._refcounts[block]

    def take(self) -> BlockId:
        """A free block, now with one owner. The caller has made sure that there is one."""
        block = self._free.pop()
        assert self._refcounts[block] == 0, "a free block has an owner"
        self._refcounts[block] = 1
        return block

    def acquire(self, block: BlockId) -> int:
        """One more owner of a block that is in use or cached; returns how many it has now."""
        self._refcounts[block] += 1
        return self._refcounts[block]

    def drop(self, block: BlockId) -> int:
        """One owner less; returns how many are left. At zero the caller must `free` the block or keep it cached."""
        count = self._refcounts[block] - 1
        assert count >= 0, "a block was released twice"
        self._refcounts[block] = count
        return count

    def free(self, block: BlockId) -> None:
        """Puts a block that has no owner and no place in the index back on the free list."""
        assert self._refcounts[block] == 0, "freed while in use"
        self._free.append(block)

    def check_invariants(self, owners: dict[BlockId, int], cached: set[BlockId]) -> None:
        """Every block is free, cached without an owner, or owned exactly as often as `owners` says."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert not free & cached, "a block is both free and cached"
        for index, count in enumerate(self._refcounts):
            block = BlockId(index)
            assert count == owners.get(block, 0), (
                f"block {block} has {count} references and {owners.get(block, 0)} owners"
            )
            idle = (block in free) + (block in cached)
            assert idle == (count == 0), f"block {block} with {count} references is lost or free while in use"
