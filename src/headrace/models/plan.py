"""Which tensors a decoder needs, and the check of a checkpoint against that, before anything is packed.

Called by `loader.py`; `testing/tiny.py` makes random models from the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import CheckpointError
from headrace.models.config import DecoderConfig, MoeConfig
from headrace.models.fused import split_experts
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
    if config.has_head_bias:
        shapes["head.bias"] = (config.vocab_size,)
    every, dense = _layer_tensors(config), _mlp_tensors(config)
    moe = None if config.moe is None else _moe_tensors(config, config.moe)
    for i in range(config.num_layers):
        mlp = moe if moe is not None and config.is_moe(i) else dense
        shapes |= {f"layers.{i}.{name}": shape for name, shape in (every | mlp).items()}
    return shapes


def _layer_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Attention and norms, which every layer has."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "q": (q_size, hidden, config.has_qkv_bias),
        "k": (kv_size, hidden, config.has_qkv_bias),
        "v": (kv_size, hidden, config.has_qkv_bias),
        "o": (hidden, q_size, config.has_output_bias),
    }
    shapes: dict[str, Shape] = {"attn_norm.weight": (hidden,), "mlp_norm.weight": (hidden,)}
    if config.has_post_norms:
        shapes |= {"attn_post_norm.weight": (hidden,), "mlp_post_norm.weight": (hidden,)}
    if config.qk_norm is not None:
        is_whole = config.qk_norm == "whole"
        shapes["q_norm.weight"] = (q_size if is_whole else config.head_dim,)
        shapes["k_norm.weight"] = (kv_size if is_whole else config.head_dim,)
    return shapes | _matrix_tensors(matrices)


def _mlp_tensors(config: DecoderConfig, prefix: str = "", inner: int = 0) -> dict[str, Shape]:
    """A gated MLP, by default the one of a dense layer."""
    hidden, inner, has_bias = config.hidden_size, inner or config.intermediate_size, config.has_mlp_bias
    return _matrix_tensors(
        {
            f"{prefix}gate": (inner, hidden, has_bias),
            f"{prefix}up": (inner, hidden, has_bias),
            f"{prefix}down": (hidden, inner, has_bias),
        }
    )


def _moe_tensors(config: DecoderConfig, moe: MoeConfig) -> dict[str, Shape]:
    """In place of the MLP, in a layer with experts. Experts have no biases."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"router.weight": (moe.num_experts, hidden)}
    if moe.has_routing_bias:
        shapes["router.bias"] = (moe.num_experts,)
    if moe.shared_size:
        shapes |= _mlp_tensors(config, "shared_", moe.shared_size)
    if moe.has_shared_gate:
        shapes["shared_expert_gate.weight"] = (1, hidden)
    for e in range(moe.num_experts):
        shapes[f"experts.{e}.gate.weight"] = (moe.expert_size, hidden)
        shapes[f"experts.{e}.up.weight"] = (moe.expert_size, hidden)
        shapes[f"experts.{e}.down.weight"] = (hidden, moe.expert_size)
    return shapes


def _matrix_tensors(matrices: Mapping[str, tuple[int, int, bool]]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for module, (num_outputs, num_inputs, has_bias) in matrices.items():
        shapes[f"{module}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            shapes[f"{module}.bias"] = (num_outputs,)
    return shapes


def match_tensors(checkpoint: Checkpoint, config: DecoderConfig, names: NameMap) -> dict[str, CheckpointTensor]:
    """The checkpoint's tensors under our names; missing, unknown and misshapen ones are errors."""
    found: Mapping[str, CheckpointTensor] = {names.normalise(name): t for name, t in checkpoint.tensors.items()}
    try:
        found = split_experts(found, config.moe, names)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    matched = {}
    for name, shape in expected_tensors(config).items():
        source_name = names.source_name(name)
        tensor = found.get(source_name)
        if tensor is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {source_name} of shape {shape} is missing")
        fitted = tensor.fitted(shape)
        if fitted is None:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {source_name} has shape {tensor.shape}, the config asks for {shape}"
            )
        matched[name] = fitted
    known = {names.source_name(name) for name in matched} | {names.source_name("head.weight")}
    unknown = [name for name in found if name not in known and not names.is_ignored(name)]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path}: {len(unknown)} tensors that {config.architecture} does not have,"
            f" such as {unknown[0][:80]!r} of shape {found[unknown[0]].shape}"
        )
    return matched
