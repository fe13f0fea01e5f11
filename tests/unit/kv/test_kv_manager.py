"""KV books: sharing, eviction, epochs, salts, and a random walk that keeps every block accounted for."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.kv import BlockTable, HashChain, KVManager

SIZE = 4


def chain(kv: KVManager, token_ids: list[int], **key: object) -> HashChain:
    it = HashChain(kv.cache_key(**key), kv.block_size)  # type: ignore[arg-type]
    it.extend(token_ids)
    return it


def run(kv: KVManager, token_ids: list[int], **key: object) -> BlockTable:
    """A sequence that has computed all its tokens."""
    table = kv.allocate(chain(kv, token_ids, **key), len(token_ids), len(token_ids) - 1)
    assert table is not None
    kv.register(table, len(token_ids) // kv.block_size)
    return table


def cached(kv: KVManager, token_ids: list[int], **key: object) -> int:
    """How many tokens a sequence would find now; looks without touching."""
    return len(kv._index.match(chain(kv, token_ids, **key).hashes, (len(token_ids) - 1) // SIZE)) * SIZE


def test_a_prefix_is_found_while_in_use_and_after() -> None:
    kv = KVManager(16, SIZE)
    first = run(kv, list(range(10)))
    second = run(kv, [*range(8), 50, 51])
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert kv.num_free == 16 - 4
    kv.check_invariants([first, second])
    kv.release(first)
    kv.release(second)
    assert kv.num_free == 16
    assert cached(kv, [*range(8), 9]) == 8
    kv.check_invariants([])


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    kv = KVManager(16, SIZE)
    kv.release(run(kv, list(range(8))))
    assert cached(kv, list(range(8))) == 4
    assert cached(kv, list(range(9))) == 8


def test_blocks_are_found_only_once_registered() -> None:
    kv = KVManager(16, SIZE)
    tokens = list(range(12))
    table = kv.allocate(chain(kv, tokens), 12, 11)
    assert table is not None
    assert cached(kv, tokens) == 0
    kv.register(table, 2)
    assert cached(kv, tokens) == 8


def test_a_new_weights_epoch_makes_old_blocks_unreachable() -> None:
    kv = KVManager(16, SIZE)
    tokens = list(range(12))
    kv.release(run(kv, tokens))
    half_done = kv.allocate(chain(kv, [60 + i for i in range(12)]), 12, 0)
    assert half_done is not None
    kv.register(half_done, 1)
    kv.set_weights_epoch(1)
    assert cached(kv, tokens) == 0
    kv.register(half_done, 3)  # computed with both weights: must never be found
    assert cached(kv, [60 + i for i in range(12)]) == 0
    assert kv.num_cached == 0
    kv.release(half_done)
    assert kv.num_free == 16
    with pytest.raises(AssertionError, match="other weights"):
        kv.allocate(half_done.chain, 12, 11)


def test_salts_and_private_keys_isolate() -> None:
    kv = KVManager(16, SIZE)
    tokens = list(range(8))
    kv.release(run(kv, tokens, cache_salt="a"))
    assert cached(kv, tokens) == cached(kv, tokens, cache_salt="b") == cached(kv, tokens, private_to=1) == 0
    assert cached(kv, tokens, cache_salt="a") == 4


def test_the_least_recently_used_leaf_goes_first() -> None:
    kv = KVManager(6, SIZE)
    old, new = list(range(12)), [*range(4), *range(50, 58)]
    kv.release(run(kv, old))
    kv.release(run(kv, new))  # shares the first block, and is younger: 5 blocks cached, 1 free
    table = kv.allocate(None, 2 * SIZE, 0)  # the free one and the oldest leaf
    assert table is not None
    assert cached(kv, [*old, 1]) == 8
    kv.append(table)
    assert cached(kv, [*old, 1]) == 4
    assert cached(kv, [*new, 1]) == 12
    kv.check_invariants([table])


def test_when_memory_is_short_nothing_changes() -> None:
    kv = KVManager(4, SIZE)
    kv.release(run(kv, list(range(12))))
    table = kv.allocate(None, 2 * SIZE, 0)
    assert table is not None
    assert kv.num_free == 2
    # Two of its blocks are cached and free, but they count: once found they are no longer there to take.
    assert kv.allocate(chain(kv, list(range(16))), 16, 15) is None
    assert kv.allocate(None, SIZE, 0, num_spare=2) is None
    assert kv.num_free == 2
    kv.check_invariants([table])


def test_two_that_computed_the_same_block_at_once_lose_it_together() -> None:
    kv = KVManager(8, SIZE)
    first = kv.allocate(chain(kv, list(range(4))), 4, 3)
    twin = kv.allocate(chain(kv, list(range(9))), 9, 8)
    assert first is not None
    assert twin is not None
    kv.register(first, 1)
    kv.register(twin, 2)  # its second block hangs below the other's first one
    assert cached(kv, list(range(9))) == 8
    kv.release(first)
    kv.check_invariants([twin])
    hoard = kv.allocate(None, kv.num_free * SIZE, 0)  # evicts the parent while the child is in use
    assert hoard is not None
    kv.check_invariants([twin, hoard])
    assert kv.num_cached == 0
    kv.release(twin)
    kv.release(hoard)
    assert kv.num_free == 8
    kv.check_invariants([])


def test_what_a_faulty_sequence_computed_is_forgotten() -> None:
    kv = KVManager(8, SIZE)
    table = run(kv, list(range(9)))
    kv.release(table, forget=True)
    assert kv.num_cached == 0
    assert kv.num_free == 8
    kv.check_invariants([])


def test_reset_leaves_the_blocks_in_use_alone() -> None:
    kv = KVManager(8, SIZE)
    kv.release(run(kv, [70, 71, 72, 73]))
    table = run(kv, list(range(8)))
    assert kv.reset() == 3
    kv.check_invariants([table])
    assert kv.num_free == 6
    assert cached(kv, list(range(9))) == 0


def test_a_double_release_is_noticed() -> None:
    kv = KVManager(8, SIZE)
    table = run(kv, list(range(8)))
    blocks = list(table.block_ids)
    kv.release(table)
    kv.release(table)  # an empty table has nothing to give back
    table.block_ids = blocks
    with pytest.raises(AssertionError, match="released twice"):
        kv.release(table)


class KVMachine(RuleBasedStateMachine):
    """Sequences come, grow and go at random over a small pool; after every move each block has its place."""

    @initialize(num_blocks=st.integers(4, 12))
    def build(self, num_blocks: int) -> None:
        self.kv = KVManager(num_blocks, 2)
        self.live: list[tuple[BlockTable, list[int]]] = []

    def check(self) -> None:
        self.kv.check_invariants(table for table, _ in self.live)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), may_read=st.booleans(), spare=st.integers(0, 2))
    def start(self, tokens: list[int], may_read: bool, spare: int) -> None:
        free = self.kv.num_free
        limit = len(tokens) - 1 if may_read else 0
        table = self.kv.allocate(chain(self.kv, tokens), len(tokens), limit, spare)
        if table is None:
            assert self.kv.num_free == free
        else:
            assert table.num_cached_tokens <= limit
            assert self.kv.num_free >= spare
            self.live.append((table, tokens))
        self.check()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        table, tokens = data.draw(st.sampled_from(self.live))
        full = len(tokens) // 2
        if table.num_registered < full:
            self.kv.register(table, data.draw(st.integers(table.num_registered, full)))
        self.check()

    @precondition(lambda self: self.live and self.kv.num_free)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        table, tokens = data.draw(st.sampled_from(self.live))
        self.kv.append(table)
        assert table.chain is not None
        tokens += [1] * (len(table.block_ids) * 2 - len(tokens))
        table.chain.extend(tokens[table.chain.num_tokens :])
        self.check()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.booleans())
    def finish(self, data: st.DataObject, forget: bool) -> None:
        entry = data.draw(st.sampled_from(self.live))
        self.live = [other for other in self.live if other is not entry]
        self.kv.release(entry[0], forget=forget)
        self.check()

    @rule(new_weights=st.booleans())
    def reset(self, new_weights: bool) -> None:
        if new_weights:
            self.kv.set_weights_epoch(self.kv.weights_epoch + 1)
        else:
            self.kv.reset()
        assert self.kv.num_cached == 0
        self.check()

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for table, _ in self.live:
                self.kv.release(table)
            self.kv.check_invariants([])
            assert self.kv.num_free == self.kv.num_blocks


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
