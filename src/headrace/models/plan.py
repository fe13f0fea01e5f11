"""Which tensors a decoder needs, and the check of a checkpoint against that, before anything is packed.

Called by `loader.py`; `testing/tiny.py` makes random models from the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import CheckpointError
from headrace.models.config import DecoderConfig
from headrace.models.names.base import NameMap
from headrace.weights.checkpoint import Checkpoint
from headrace.weights.tensor import CheckpointTensor

Shape = tuple[int, ...]


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Our names (see `names/base.py`) and the shape of each."""
    shapes: dict[str, Shape] = {
        "embed.weight": (config.vocab_size, config.hidden_size),
        "final_norm.weight": (config.hidden_size,),
    }
    if not config.has_tied_head:
        shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    layer = _layer_tensors(config)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_tensors(config: DecoderConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "q": (q_size, hidden, config.has_qkv_bias),
        "k": (kv_size, hidden, config.has_qkv_bias),
        "v": (kv_size, hidden, config.has_qkv_bias),
        "o": (hidden, q_size, config.has_output_bias),
        "gate": (inner, hidden, config.has_mlp_bias),
        "up": (inner, hidden, config.has_mlp_bias),
        "down": (hidden, inner, config.has_mlp_bias),
    }
    shapes: dict[str, Shape] = {"attn_norm.weight": (hidden,), "mlp_norm.weight": (hidden,)}
    if config.has_post_norms:
        shapes |= {"attn_post_norm.weight": (hidden,), "mlp_post_norm.weight": (hidden,)}
    if config.has_qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    for module, (num_outputs, num_inputs, has_bias) in matrices.items():
        shapes[f"{module}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            shapes[f"{module}.bias"] = (num_outputs,)
    return shapes


def match_tensors(checkpoint: Checkpoint, config: DecoderConfig, names: NameMap) -> dict[str, CheckpointTensor]:
    """The checkpoint's tensors under our names; missing, unknown and misshapen ones are errors."""
    found: Mapping[str, CheckpointTensor] = {names.normalise(name): t for name, t in checkpoint.tensors.items()}
    matched = {}
    for name, shape in expected_tensors(config).items():
        source_name = names.source_name(name)
        tensor = found.get(source_name)
        if tensor is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {source_name} of shape {shape} is missing")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {source_name} has shape {tensor.shape}, the config asks for {shape}"
            )
        matched[name] = tensor
    known = {names.source_name(name) for name in matched} | {names.source_name("head.weight")}
    unknown = [name for name in found if name not in known and not names.is_ignored(name)]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path}: {len(unknown)} tensors that {config.architecture} does not have,"
            f" such as {unknown[0][:80]!r} of shape {found[unknown[0]].shape}"
        )
    return matched
