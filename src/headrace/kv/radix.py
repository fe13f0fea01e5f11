"""The prefix index: a tree of full blocks whose KV is computed, each found by its chained hash. Used by the manager.

A node's parent is the block before it, and is always in the tree too. A node whose block has no owner is evictable; the
least recently used goes first. Owners hold whole chains and give them back last block first, so that leaves are older
than their parents and go before them. It counts no references: the manager says when a block gains or loses its last
owner.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.types import BlockHash, BlockId


class Node:
    """A cached block. `parent` is None for the first block of a sequence."""

    __slots__ = ("block", "children", "hash", "parent")

    def __init__(self, block_hash: BlockHash, block: BlockId, parent: Node | None) -> None:
        self.hash = block_hash
        self.block = block
        self.parent = parent
        self.children: set[Node] = set()


class PrefixIndex:
    """Blocks by hash, and which of them may be evicted."""

    def __init__(self) -> None:
        self._nodes: dict[BlockHash, Node] = {}
        self._by_block: dict[BlockId, Node] = {}
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def match(self, hashes: list[BlockHash], max_blocks: int) -> list[BlockId]:
        """The blocks of the longest cached prefix, at most `max_blocks`. Takes no ownership."""
        found: list[BlockId] = []
        nodes = self._nodes
        for i in range(min(max_blocks, len(hashes))):
            node = nodes.get(hashes[i])
            if node is None:
                break
            found.append(node.block)
        return found

    def insert(self, block_hash: BlockHash, block: BlockId, parent_hash: BlockHash | None) -> bool:
        """Adds a block that has an owner. False if its parent is no longer here: it could never be found.

        If the same content is cached in another block already, that one stays and this one is left out.
        """
        parent = None
        if parent_hash is not None:
            parent = self._nodes.get(parent_hash)
            if parent is None:
                return False
        if block_hash in self._nodes:
            return True
        node = Node(block_hash, block, parent)
        self._nodes[block_hash] = node
        self._by_block[block] = node
        if parent is not None:
            parent.children.add(node)
        return True

    def is_evictable(self, block: BlockId) -> bool:
        return block in self._evictable

    def mark_used(self, block: BlockId) -> None:
        """An evictable block has an owner again."""
        del self._evictable[block]

    def mark_unused(self, block: BlockId) -> bool:
        """A block lost its last owner. True: the index keeps it, evictable; False: it is not cached, free it."""
        if block not in self._by_block:
            return False
        self._evictable[block] = None
        return True

    def evict(self) -> list[BlockId]:
        """Drops the least recently used evictable block; returns the blocks that are free now, at least one."""
        block = next(iter(self._evictable))
        return self._drop(self._by_block[block])

    def forget(self, block: BlockId) -> list[BlockId]:
        """Drops a block and all that follows it, whoever uses them; returns the blocks that are free now."""
        node = self._by_block.get(block)
        return self._drop(node) if node is not None else []

    def clear(self) -> list[BlockId]:
        """Drops everything; returns the blocks that are free now."""
        freed = list(self._evictable)
        for node in self._nodes.values():
            node.parent = None  # a cycle, which would wait for the garbage collector
        self._nodes.clear()
        self._by_block.clear()
        self._evictable.clear()
        return freed

    def _drop(self, top: Node) -> list[BlockId]:
        """A node leaves with its subtree. It has one only when two sequences computed the same block at once: then the
        second one's later blocks hang below a block that it does not own."""
        if top.parent is not None:
            top.parent.children.discard(top)
        freed: list[BlockId] = []
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            node.parent = None
            del self._nodes[node.hash]
            del self._by_block[node.block]
            if node.block in self._evictable:
                del self._evictable[node.block]
                freed.append(node.block)
        return freed

    def evictable_blocks(self) -> set[BlockId]:
        return set(self._evictable)

    def check_invariants(self) -> None:
        assert len(self._nodes) == len(self._by_block), "two nodes share a block"
        for block_hash, node in self._nodes.items():
            assert node.hash == block_hash
            assert self._by_block[node.block] is node
            if node.parent is not None:
                assert self._nodes.get(node.parent.hash) is node.parent, "a node's parent left before it"
                assert node in node.parent.children
            for child in node.children:
                assert child.parent is node
                assert self._nodes.get(child.hash) is child
        assert self._evictable.keys() <= self._by_block.keys(), "an evictable block is not cached"
