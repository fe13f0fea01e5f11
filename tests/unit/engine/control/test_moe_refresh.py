"""New weights for a model with experts: one tensor per expert or one for all, whole or changed in places."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import FailedRequest
from headrace.kernels import create_backend
from headrace.models import load_model
from headrace.models.fused import fused_parts
from headrace.models.names.hf import QWEN_MOE
from headrace.models.registry import find_family
from headrace.models.stage import WeightStage
from headrace.testing.refresh_rig import RefreshRig, raw_source
from headrace.testing.tiny import write_tiny_model
from headrace.testing.tiny_gguf import write_tiny_gguf
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.safetensors import read_folder
from headrace.weights.tensor import CheckpointTensor

LAYER = "model.layers.0.mlp."
GATE_UP = f"{LAYER}experts.gate_up_proj"
SIZES: dict[str, Any] = {"num_experts": 6, "num_experts_per_token": 2, "expert_size": 24}


@pytest.fixture(scope="module")
def moe_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    root = tmp_path_factory.mktemp("moe")
    return lambda seed: write_tiny_model(root / f"{seed}", architecture="qwen3_moe", seed=seed, **SIZES)


@pytest.fixture
def moe_rig(moe_models: Callable[[int], Path]) -> RefreshRig:
    return RefreshRig(moe_models(1), backend="reference-exact")


@pytest.fixture(scope="module")
def moe_fresh(moe_models: Callable[[int], Path]) -> Callable[[int], list[int]]:
    return lambda seed: RefreshRig(moe_models(seed), backend="reference-exact").generate()


def fused(folder: Path) -> dict[str, CheckpointTensor]:
    """A checkpoint's tensors as models in memory have them, all experts in one."""
    checkpoint = open_checkpoint(folder)
    config = find_family(checkpoint).make_config(checkpoint)
    assert config.moe is not None
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if ".experts." not in name}
    for name in (f"model.layers.{i}.{module}" for i in range(config.num_layers) for module in QWEN_MOE.fused):
        parts = fused_parts(name, config.moe, QWEN_MOE)
        assert parts is not None
        values = [checkpoint.tensors[QWEN_MOE.source_name(part)].dequantize() for part in parts]
        whole = np.stack(values).reshape(config.moe.num_experts, -1, values[0].shape[1])
        tensors[name] = CheckpointTensor.from_floats(name, whole)
    return tensors


def test_either_name_brings_the_same_weights(
    moe_rig: RefreshRig, moe_models: Callable[[int], Path], moe_fresh: Callable[[int], list[int]], tmp_path: Path
) -> None:
    assert moe_rig.generate() == moe_fresh(1) != moe_fresh(2)
    per_expert = raw_source(dict(read_folder(moe_models(2))), tmp_path)
    moe_rig.control("refresh_weights", source=per_expert)
    assert moe_rig.generate() == moe_fresh(2)
    moe_rig.control("refresh_weights", source={"kind": "path", "path": str(moe_models(1))})
    assert moe_rig.generate() == moe_fresh(1)
    moe_rig.control("refresh_weights", source=raw_source(fused(moe_models(2)), tmp_path))
    assert moe_rig.generate() == moe_fresh(2)
    assert moe_rig.control("compare", path=str(moe_models(2)))["match"] is True
    values = moe_rig.control("get_weight", name=GATE_UP, max_values=10_000)
    assert values["shape"] == [6, 48, 32]
    assert values["values"] == fused(moe_models(2))[GATE_UP].dequantize().reshape(-1).tolist()


def test_buckets_of_either_kind(
    moe_rig: RefreshRig, moe_models: Callable[[int], Path], moe_fresh: Callable[[int], list[int]], tmp_path: Path
) -> None:
    """Layer 0 comes fused, layer 1 expert by expert."""
    tensors = {name: t for name, t in fused(moe_models(2)).items() if not name.startswith("model.layers.1.")}
    tensors |= {name: t for name, t in read_folder(moe_models(2)).items() if name.startswith("model.layers.1.")}
    names = np.random.default_rng(3).permutation(list(tensors)).tolist()
    moe_rig.control("begin_refresh")
    for start in range(0, len(names), 5):
        bucket = {name: tensors[name] for name in names[start : start + 5]}
        result = moe_rig.control("apply_refresh", source=raw_source(bucket, tmp_path))
    assert result["num_missing"] == 0
    assert moe_rig.generate() == moe_fresh(1)
    moe_rig.control("commit_refresh")
    assert moe_rig.generate() == moe_fresh(2)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_delta_of_one_expert(
    moe_rig: RefreshRig, moe_models: Callable[[int], Path], tmp_path: Path, is_fused: bool
) -> None:
    """Its gate alone changes: the up that is packed with it stays."""
    name = f"{LAYER}experts.3.gate_proj.weight"
    old, new = read_folder(moe_models(1)), read_folder(moe_models(2))
    if is_fused:
        whole = fused(moe_models(1))[GATE_UP].dequantize()
        whole[3, : SIZES["expert_size"]] = new[name].dequantize()
        sent = {GATE_UP: CheckpointTensor.from_floats(GATE_UP, whole)}
    else:
        sent = {name: new[name]}
    moe_rig.control("refresh_weights", source=raw_source(sent, tmp_path), delta=True)
    for tensor, source in ((name, new), (f"{LAYER}experts.3.up_proj.weight", old), (f"{LAYER}gate.weight", old)):
        np.testing.assert_array_equal(moe_rig.real.read_weight(tensor), source[tensor].dequantize())
    assert moe_rig.control("compare", path=str(moe_models(1)))["mismatches"] == [name]


def test_a_sparse_delta_of_a_fused_tensor(
    moe_rig: RefreshRig, moe_models: Callable[[int], Path], tmp_path: Path
) -> None:
    """Flat places count through all experts."""
    columns, rows = 32, SIZES["expert_size"]
    index = (2 * 2 * rows + rows + 1) * columns + 7  # expert 2, the second row of up, column 7
    body = tmp_path / "body"
    body.write_bytes(np.array([index], np.int32).tobytes() + np.array([0.5], np.float32).tobytes())
    source = {
        "kind": "file",
        "file": str(body),
        "format": "sparse",
        "names": [GATE_UP],
        "dtypes": ["float32"],
        "shapes": [[1]],
    }
    moe_rig.control("refresh_weights", source=source, delta=True)
    up = f"{LAYER}experts.2.up_proj.weight"
    expected = read_folder(moe_models(1))[up].dequantize()
    expected[1, 7] = 0.5
    np.testing.assert_array_equal(moe_rig.real.read_weight(up), expected)


def test_what_is_refused(moe_rig: RefreshRig, moe_models: Callable[[int], Path], tmp_path: Path) -> None:
    answer, tensors = moe_rig.generate(), fused(moe_models(2))

    def refusal(changed: dict[str, CheckpointTensor], **options: Any) -> str:
        with pytest.raises(FailedRequest) as caught:
            moe_rig.control("refresh_weights", source=raw_source(changed, tmp_path), **options)
        return str(caught.value)

    whole = tensors[GATE_UP].dequantize()
    fewer = {GATE_UP: CheckpointTensor.from_floats(GATE_UP, whole[:5])}
    assert "has shape [5, 48, 32]; needed are 6 experts, with the rows of gate and up" in refusal(tensors | fewer)
    narrow = {GATE_UP: CheckpointTensor.from_floats(GATE_UP, whole[:, :46])}
    assert "experts.0.gate_proj.weight' has shape [23, 32]; [24, 32] is needed" in refusal(tensors | narrow)
    one = f"{LAYER}experts.0.up_proj.weight"
    assert f"{one!r} came twice" in refusal(tensors | {one: read_folder(moe_models(2))[one]})
    del tensors[f"{LAYER}experts.down_proj"]
    assert "6 tensors have not come: model.layers.0.mlp.experts.0.down_proj.weight" in refusal(tensors)
    other = write_tiny_model(tmp_path / "other", architecture="qwen3_moe", **(SIZES | {"num_experts": 4}))
    with pytest.raises(FailedRequest, match="num_experts is 4, but the model that is served has 6"):
        moe_rig.control("refresh_weights", source={"kind": "path", "path": str(other)})
    assert moe_rig.generate() == answer


def test_routers_are_never_rounded(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", architecture="qwen2_moe", num_experts=4)
    backend = create_backend("native", num_threads=1, quantization="w4")
    model = load_model(folder, backend)
    loaded = model.weights.formats(backend)
    stage = WeightStage(backend, model.layouts, model.weights.shard, loaded)
    stage.add_path(folder)
    for formats in (loaded, stage.finish().formats(backend)):
        assert formats["layers.1.router"] == formats["layers.1.shared_expert_gate"] == ("f32",)
        assert formats["layers.1.experts.3.gate_up"] == ("w4", "w4")
        assert formats["layers.1.experts.3.down"] == formats["layers.1.shared_down"] == ("w4",)


def test_a_stage_goes_at_once_when_nobody_has_it(tmp_path: Path) -> None:
    """It has a whole set of weights, which must not wait until the collector of cycles runs."""
    folder = write_tiny_model(tmp_path / "model")
    backend = create_backend("native", num_threads=1)
    model = load_model(folder, backend)
    stage = WeightStage(backend, model.layouts, model.weights.shard, {})
    stage.add_path(folder)
    there = weakref.ref(stage)
    gc.disable()
    try:
        del stage
        assert there() is None
    finally:
        gc.enable()


def test_a_gguf_model_takes_either_name(moe_models: Callable[[int], Path], tmp_path: Path) -> None:
    path = write_tiny_gguf(moe_models(1), tmp_path / "model.gguf")
    newer = write_tiny_gguf(moe_models(2), tmp_path / "newer.gguf")
    expected = RefreshRig(newer, backend="reference-exact").generate()
    for sent in (dict(read_folder(moe_models(2))), fused(moe_models(2)), dict(open_checkpoint(newer).tensors)):
        rig = RefreshRig(path, backend="reference-exact")
        rig.control("refresh_weights", source=raw_source(sent, tmp_path))
        assert rig.generate() == expected
