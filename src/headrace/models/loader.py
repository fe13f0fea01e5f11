"""Loads a checkpoint into a backend: config, check of every tensor, packing.

Called by the executor through `load_model`. Raises `CheckpointError` alone; reads each tensor once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.kernels.ops import Backend, KVSpec
from headrace.models.decoder import Decoder
from headrace.models.plan import match_tensors
from headrace.models.registry import find_family
from headrace.models.shard import Shard, Sharding
from headrace.models.units import Layout, WeightSet
from headrace.weights.checkpoint import open_checkpoint

ALONE = Sharding()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that a backend can run, and what the engine must know of it."""

    decoder: Decoder
    weights: WeightSet
    shard: Shard
    layouts: tuple[Layout, ...]  # in which tensors may come later: that of the file, then that of transformers
    kv_spec: KVSpec
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def load_model(path: Path, backend: Backend, sharding: Sharding = ALONE) -> LoadedModel:
    """Reads the checkpoint at `path` and packs its weights into `backend`: of several ranks, this one's alone. Raises
    ConfigError where the model cannot be cut as `sharding` says."""
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint)
    config = family.make_config(checkpoint)
    tensors = match_tensors(checkpoint, config, family.names)
    packer = backend.packer()
    layout = Layout(config, family.names)
    shard = Shard.of(config, sharding)
    handles = {
        name: unit.pack({each: shard.cut(each, tensors[each]) for each in unit.tensors}, packer, config)
        for name, unit in layout.units.items()
        if shard.holds(name)
    }
    weights = WeightSet(layout, handles, shard)
    return LoadedModel(
        decoder=weights.decoder(backend),
        weights=weights,
        shard=shard,
        layouts=(layout,) if family.as_transformers is None else (layout, family.as_transformers(config)),
        kv_spec=KVSpec(config.num_layers, len(shard.kv_heads), config.head_dim),
        name=checkpoint.name,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_positions,
        eos_token_ids=config.eos_token_ids,
    )
