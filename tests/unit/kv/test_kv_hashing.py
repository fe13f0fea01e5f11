"""A block's name must change with every token before its end and with every field of its key, and with nothing else."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.kv import CacheKey, HashChain

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def chain_of(token_ids: list[int], key: CacheKey | None = None, block_size: int = 4) -> HashChain:
    chain = HashChain(key or CacheKey(), block_size)
    chain.extend(token_ids)
    return chain


@given(token_lists, st.lists(st.integers(1, 40), max_size=6))
def test_any_split_of_the_tokens_gives_the_same_chain(token_ids: list[int], cuts: list[int]) -> None:
    whole = chain_of(token_ids)
    piecewise = HashChain(CacheKey(), 4)
    for stop in [*sorted(cut for cut in cuts if cut <= len(token_ids)), len(token_ids)]:
        piecewise.extend(token_ids[piecewise.num_tokens : stop])
    assert piecewise.hashes == whole.hashes
    assert len(whole.hashes) == len(token_ids) // 4


@given(token_lists.filter(lambda ids: len(ids) >= 8), st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(token_ids: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(token_ids) // 4 * 4 - 1))
    changed = list(token_ids)
    changed[place] = (changed[place] + 1) % 2**31
    before, after = chain_of(token_ids).hashes, chain_of(changed).hashes
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < place // 4 for i in range(len(before))]


def test_every_field_of_the_key_separates() -> None:
    keys = [
        CacheKey(),
        CacheKey(weights_epoch=1),
        CacheKey(adapter="a"),
        CacheKey(cache_salt="a"),
        CacheKey(cache_salt="1"),
        CacheKey(private_to=1),
        CacheKey(mm_hashes=(b"a",)),
        CacheKey(mm_hashes=(b"a", b"")),
        CacheKey(adapter="a", cache_salt="b"),
        CacheKey(adapter="b", cache_salt="a"),
    ]
    firsts = [chain_of([1, 2, 3, 4], key).hashes[0] for key in keys]
    for one, other in itertools.combinations(firsts, 2):
        assert one != other


def test_a_fork_goes_on_by_itself() -> None:
    chain = chain_of(list(range(12)))
    fork = chain.fork(2)
    assert (fork.num_tokens, chain.num_tokens) == (8, 12)
    fork.extend([8, 9, 10, 99])
    assert fork.hashes[:2] == chain.hashes[:2]
    assert fork.hashes[2] == chain_of([*range(8), 8, 9, 10, 99]).hashes[2] != chain.hashes[2]
    assert chain.fork(0).hashes == []
