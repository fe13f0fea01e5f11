"""How long a sequence may be and how many KV blocks there are; decided once, when the core is made.

Pure arithmetic on the options and the model; `available_memory` alone looks at the machine. What cannot work is a
ConfigError that says both numbers and what to change.
"""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.config.size import format_size, parse_size
from headrace.errors import ConfigError
from headrace.executor.base import ModelInfo

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")


def resolve_max_model_len(asked: int | None, info: ModelInfo, fitting: int) -> int:
    """The longest prompt plus output that is served: what was asked, or what the model and the KV memory allow.

    `fitting` is the longest sequence that the KV memory holds, in tokens.
    """
    if asked is None:
        if not 2 <= fitting < info.max_model_len:
            return info.max_model_len
        logger.warning(
            "the KV memory holds %d of the model's %d tokens, so --max-model-len is %d; --kv-cache-memory gives more",
            fitting,
            info.max_model_len,
            fitting,
        )
        return fitting
    if not 2 <= asked <= info.max_model_len:
        raise ConfigError(
            f"--max-model-len {asked} is not possible: {info.name} takes from 2 to {info.max_model_len} tokens"
        )
    return asked


def resolve_max_num_seqs(config: SchedulerConfig) -> int:
    """Sequences that run at once: never more than a step has tokens, so that a decode never waits for the budget."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if config.priority_ageing_s < 0:
        raise ConfigError(f"--priority-ageing-s must not be negative, got {config.priority_ageing_s}")
    if config.max_num_seqs > config.max_num_batched_tokens:
        logger.warning("a step of %d tokens runs no more sequences than that", config.max_num_batched_tokens)
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def fitting_tokens(cache: CacheConfig, info: ModelInfo, free_bytes: int) -> int:
    """The longest sequence that the KV memory holds. An explicit `num_kv_blocks` limits no sequence here: it is for
    tests of a memory that is too small."""
    if cache.num_kv_blocks is not None or info.kv_bytes_per_token == 0:
        return info.max_model_len
    memory, _ = _kv_memory(cache, free_bytes)
    return memory // (cache.block_size * info.kv_bytes_per_token) * cache.block_size


def num_kv_blocks(cache: CacheConfig, info: ModelInfo, max_model_len: int, max_num_seqs: int, free_bytes: int) -> int:
    """Blocks of `--kv-cache-memory`, or of a share of `free_bytes`; no more than could ever be used at once.

    An explicit `num_kv_blocks` is taken as it is: longer prompts are then refused one by one.
    """
    if cache.block_size < 1:
        raise ConfigError(f"--block-size must be at least 1, got {cache.block_size}")
    if cache.num_kv_blocks is not None:
        if cache.num_kv_blocks < 1:
            raise ConfigError(f"--num-kv-blocks must be at least 1, got {cache.num_kv_blocks}")
        return cache.num_kv_blocks
    blocks_per_sequence = -(-max_model_len // cache.block_size)
    useful_blocks = max_num_seqs * blocks_per_sequence
    block_bytes = cache.block_size * info.kv_bytes_per_token
    if block_bytes == 0:
        return useful_blocks
    memory, source = _kv_memory(cache, free_bytes)
    num_blocks = memory // block_bytes
    if num_blocks < blocks_per_sequence:
        fitting = num_blocks * cache.block_size
        hint = f" or lower --max-model-len to at most {fitting}" if fitting >= 2 else ""
        raise ConfigError(
            f"one sequence of {max_model_len} tokens needs {format_size(blocks_per_sequence * block_bytes)} of KV "
            f"memory, but {source} holds {format_size(memory)}: give more with --kv-cache-memory{hint}"
        )
    return min(num_blocks, useful_blocks)


def _kv_memory(cache: CacheConfig, free_bytes: int) -> tuple[int, str]:
    """Bytes for KV, and the words that say where they come from."""
    if cache.kv_cache_memory is not None:
        return parse_size(cache.kv_cache_memory), f"--kv-cache-memory {cache.kv_cache_memory}"
    if not 0 < cache.kv_cache_fraction <= 1:
        raise ConfigError(f"--kv-cache-fraction must be above 0 and at most 1, got {cache.kv_cache_fraction}")
    source = f"{cache.kv_cache_fraction:g} of the {format_size(free_bytes)} of free memory"
    return int(free_bytes * cache.kv_cache_fraction), source


def available_memory() -> int:
    """Bytes that this process could still take: what the machine has left, or its control group if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        # The page cache counts as used there, but gives way.
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        if limit != "max":
            available = min(available, max(0, int(limit) - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):
        pass  # no control group, or an older kind
    return available
