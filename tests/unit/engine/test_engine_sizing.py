"""KV memory: what is given, what is needed, and the message when the first is less than the second."""

from __future__ import annotations

import pytest

from headrace.config.options import CacheConfig
from headrace.engine.sizing import available_memory, fitting_tokens, num_kv_blocks, resolve_max_model_len
from headrace.errors import ConfigError
from headrace.executor.base import ModelInfo

KIB = 1024
INFO = ModelInfo("tiny", 100, 1000, (0,), "reference", kv_bytes_per_token=KIB)


def blocks(free_bytes: int = 0, *, max_model_len: int = 100, max_num_seqs: int = 1000, **cache: object) -> int:
    return num_kv_blocks(CacheConfig(block_size=10, **cache), INFO, max_model_len, max_num_seqs, free_bytes)  # type: ignore[arg-type]


def test_a_given_size_is_used_whatever_is_free() -> None:
    assert blocks(kv_cache_memory="1000KiB") == 100
    assert blocks(10**12, kv_cache_memory="1009KiB") == 100


def test_else_a_share_of_the_free_memory() -> None:
    assert blocks(4000 * KIB) == 100
    assert blocks(4000 * KIB, kv_cache_fraction=0.5) == 200


def test_never_more_than_could_be_used_at_once() -> None:
    assert blocks(10**12, max_num_seqs=3) == 30
    assert blocks(10**12, max_num_seqs=3, max_model_len=101) == 33


def test_an_explicit_number_wins() -> None:
    assert blocks(0, num_kv_blocks=5, kv_cache_memory="1GiB") == 5


def test_a_model_without_kv_gets_all_it_could_use() -> None:
    info = ModelInfo("echo", 100, 1000, (), "echo", kv_bytes_per_token=0)
    assert num_kv_blocks(CacheConfig(block_size=10), info, 100, 4, 0) == 40


def test_too_little_for_one_sequence_names_both_numbers_and_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        blocks(kv_cache_memory="95KiB")
    message = str(caught.value)
    assert "one sequence of 100 tokens needs 100 KiB" in message
    assert "95 KiB" in message
    assert "--kv-cache-memory" in message
    assert "--max-model-len to at most 90" in message
    assert blocks(kv_cache_memory="100KiB") == 10
    with pytest.raises(ConfigError, match=r"0\.25 of the 100 KiB of free memory"):
        blocks(100 * KIB)


@pytest.mark.parametrize(
    "cache",
    [{"kv_cache_memory": "lots"}, {"kv_cache_fraction": 0.0}, {"kv_cache_fraction": 1.5}, {"num_kv_blocks": 0}],
)
def test_bad_options_are_refused(cache: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        blocks(10**12, **cache)
    with pytest.raises(ConfigError, match="block-size"):
        num_kv_blocks(CacheConfig(block_size=0), INFO, 100, 1, 10**12)


def test_the_context_is_the_models_unless_less_is_asked() -> None:
    assert resolve_max_model_len(None, INFO, 1000) == 1000
    assert resolve_max_model_len(20, INFO, 1000) == 20
    for asked in (1001, 1, 0, -5):
        with pytest.raises(ConfigError, match=f"--max-model-len {asked} is not possible.*1000"):
            resolve_max_model_len(asked, INFO, 1000)


def test_a_context_that_nobody_asked_for_shrinks_to_the_memory() -> None:
    fitting = fitting_tokens(CacheConfig(block_size=10, kv_cache_memory="75KiB"), INFO, 0)
    assert fitting == 70
    assert resolve_max_model_len(None, INFO, fitting) == fitting
    assert resolve_max_model_len(1000, INFO, fitting) == 1000  # and num_kv_blocks refuses it


def test_this_machine_has_memory() -> None:
    assert available_memory() > 10 * 1024 * KIB
