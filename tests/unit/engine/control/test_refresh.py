"""Refreshing as a transaction, on tiny real models: what serves afterwards is what a fresh engine would serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import FailedRequest
from headrace.testing.refresh_rig import PROMPT, RefreshRig, raw_source
from headrace.testing.shared_tensors import SharedTensors
from headrace.testing.tiny import write_tiny_model
from headrace.testing.tiny_gguf import write_tiny_gguf
from headrace.types import FinishReason
from headrace.weights.incoming import tensor_checksum
from headrace.weights.safetensors import read_folder
from headrace.weights.tensor import CheckpointTensor


@pytest.mark.parametrize("staged", ["always", "never"])
def test_a_cached_prompt_gives_what_a_fresh_engine_gives(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], staged: str
) -> None:
    assert rig.generate() == fresh(1)
    result = rig.control("refresh_weights", source={"kind": "path", "path": str(models(2))}, staged=staged, version="b")
    assert (result["version"], result["epoch"], result["staged"]) == ("b", 1, staged == "always")
    assert rig.generate() == fresh(2) != fresh(1)
    assert rig.core.lifecycle.state == "ready"
    assert rig.choice(1).details[0].weights_version == "b"
    rig.control("refresh_weights", source={"kind": "path", "path": str(models(1))})
    assert rig.generate() == fresh(1)
    assert rig.core.lifecycle.version == "2", "without a label the epoch is one"


def test_every_source_brings_the_same_weights(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], tmp_path: Path
) -> None:
    tensors = read_folder(models(2))
    safetensors = {"kind": "file", "file": str(models(2) / "model.safetensors"), "format": "safetensors"}
    floats = {name: tensor.dequantize() for name, tensor in tensors.items()}
    with SharedTensors(floats) as shared:
        memory = {
            "kind": "shared_memory",
            "segment": shared.name,
            "names": shared.manifest.names,
            "dtypes": shared.manifest.dtypes,
            "shapes": shared.manifest.shapes,
            "offsets": shared.manifest.offsets,
        }
        for source in (safetensors, raw_source(dict(tensors), tmp_path), memory):
            rig.control("refresh_weights", source={"kind": "path", "path": str(models(1))})
            assert rig.generate() == fresh(1)
            rig.control("refresh_weights", source=source)
            assert rig.generate() == fresh(2), source["kind"]
    assert not (tmp_path / "body").exists()


def test_buckets_in_any_order(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], tmp_path: Path
) -> None:
    tensors = list(read_folder(models(2)).items())
    np.random.default_rng(5).shuffle(tensors)  # type: ignore[arg-type]  # a list of pairs
    assert rig.control("begin_refresh")["staged"] is True
    for start in range(0, len(tensors), 3):
        bucket = dict(tensors[start : start + 3])
        result = rig.control("apply_refresh", source=raw_source(bucket, tmp_path))
        assert result["num_missing"] == max(0, len(tensors) - start - 3)
        assert rig.generate() == fresh(1), "the old weights serve until the commit"
    rig.control("commit_refresh", version="all")
    assert rig.generate() == fresh(2)


@pytest.mark.parametrize("backend", ["native", "reference", "reference-exact"])
def test_a_delta_changes_what_it_names(models: Callable[[int], Path], tmp_path: Path, backend: str) -> None:
    rig = RefreshRig(models(1), backend=backend)
    old, new = read_folder(models(1)), read_folder(models(2))
    names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"]
    changes = {name: new[name] for name in names}
    rig.control("refresh_weights", source=raw_source(changes, tmp_path), delta=True)
    whole = RefreshRig(models(1), backend=backend)
    whole.control("refresh_weights", source=raw_source({**old, **changes}, tmp_path))
    assert rig.control("checksum") == whole.control("checksum")
    assert rig.generate() == whole.generate()


def test_a_sparse_delta(rig: RefreshRig, models: Callable[[int], Path], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    values = rig.real.read_weight(name).copy()
    indices = np.array([0, 7, 100], np.int32)
    numbers = np.array([0.5, -0.25, 2.0], np.float32)
    values.reshape(-1)[indices] = numbers
    file = tmp_path / "sparse"
    file.write_bytes(indices.tobytes() + numbers.tobytes())
    source = {
        "kind": "file", "file": str(file), "format": "sparse", "names": [name], "dtypes": ["float32"], "shapes": [[3]],
    }  # fmt: skip
    good = tensor_checksum(CheckpointTensor.from_floats(name, values))
    with pytest.raises(FailedRequest, match="its checksum is not"):
        rig.control("refresh_weights", source=source, delta=True, checksums={name: "0" * 32})
    rig.control("refresh_weights", source=source, delta=True, checksums={name: good})
    assert rig.control("checksum", names=[name])["tensors"] == {name: good}
    assert rig.control("get_weight", name=name, max_values=1)["values"] == [0.5]
    with pytest.raises(FailedRequest, match="sparse changes need a delta refresh"):
        rig.control("refresh_weights", source=source)


def test_checksum_and_compare_look_at_what_is_used(rig: RefreshRig, models: Callable[[int], Path]) -> None:
    before = rig.control("checksum")
    assert rig.control("compare", path=str(models(1))) == {"rank": 0, "match": True, "mismatches": []}
    assert rig.control("compare", path=str(models(2)))["match"] is False
    rig.control("refresh_weights", source={"kind": "path", "path": str(models(2))})
    after = rig.control("checksum")
    assert before["total"] != after["total"]
    assert before["tensors"].keys() == after["tensors"].keys() == read_folder(models(1)).keys()
    assert rig.control("compare", path=str(models(2)))["match"] is True


# ------------------------------------------------------------------------------------------- requests across a commit


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("staged", ["always", "never"])
def test_a_request_that_crosses_a_commit(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], kv: str, staged: str
) -> None:
    request = rig.submit(PROMPT, max_tokens=200, temperature=0.0)
    rig.step(5)
    before = list(rig.choice(request).token_ids)
    assert before == fresh(1)[: len(before)]
    source = {"kind": "path", "path": str(models(2))}
    rig.control("refresh_weights", source=source, mode="keep", kv=kv, staged=staged, version="two")
    crossed = len(rig.choice(request).token_ids)
    rig.run()
    record = rig.choice(request)
    assert record.finish is FinishReason.LENGTH
    assert [d.weights_version for d in record.details if d.weights_version] == ["0", "two"]
    if kv == "recompute":
        other = RefreshRig(models(2))
        assert record.token_ids[crossed:] == other.generate([*PROMPT, *record.token_ids[:crossed]], 200 - crossed)
    again = rig.generate()
    assert again == fresh(2), "what was computed with old KV is never found again"


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_other_modes_at_a_commit(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], mode: str
) -> None:
    request = rig.submit(PROMPT, max_tokens=200, temperature=0.0)
    rig.step(3)
    rig.control("refresh_weights", source={"kind": "path", "path": str(models(2))}, mode=mode)
    record = rig.choice(request)
    assert record.finish is (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)
    assert record.token_ids == RefreshRig(models(1)).generate(max_tokens=200)[: len(record.token_ids)]
    assert rig.generate() == fresh(2)


def test_sleep_takes_the_weights_and_wake_brings_them_back(rig: RefreshRig, fresh: Callable[[int], list[int]]) -> None:
    rig.generate()
    rig.control("sleep")
    assert rig.real.weight_names() == []
    with pytest.raises(FailedRequest, match="There are no weights to look at"):
        rig.control("checksum")
    rig.control("wake", tags=["weights"])
    assert rig.core.lifecycle.asleep == ("kv_cache",)
    rig.control("wake", tags=["kv_cache"])
    assert rig.generate() == fresh(1)


def test_weights_that_were_sent_do_not_come_back_by_themselves(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], tmp_path: Path
) -> None:
    tensors = dict(read_folder(models(2)))
    rig.control("refresh_weights", source=raw_source(tensors, tmp_path))
    rig.control("sleep")
    rig.control("wake")
    assert rig.core.lifecycle.state == "poisoned"
    rig.control("refresh_weights", source=raw_source(tensors, tmp_path))
    assert rig.generate() == fresh(2)


def test_a_refresh_may_come_while_weights_sleep(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], tmp_path: Path
) -> None:
    """The order of slime and verl: release, weights, update, KV memory."""
    rig.control("sleep")
    result = rig.control("refresh_weights", source=raw_source(dict(read_folder(models(2))), tmp_path))
    assert result["staged"] is False
    assert (rig.core.lifecycle.state, rig.core.lifecycle.asleep) == ("asleep", ("kv_cache",))
    rig.control("wake", tags=["kv_cache"])
    assert rig.generate() == fresh(2)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_gguf_model_takes_the_tensors_of_transformers(tmp_path: Path, backend: str) -> None:
    """Names, the order of Q and K rows, and number formats are those of the file; what comes is what trainers have."""
    folder = write_tiny_model(tmp_path / "hf", hidden_size=64, head_dim=16, intermediate_size=96)
    file = write_tiny_gguf(folder, tmp_path / "tiny.gguf", kinds={"gate": "Q4_1", "up": "Q8_0"})
    rig = RefreshRig(file, backend=backend)
    formats = rig.real.weight_formats()
    rig.control("refresh_weights", source=raw_source(dict(read_folder(folder)), tmp_path))
    assert rig.real.weight_formats() == formats
    assert rig.control("compare", path=str(folder))["match"] is True
    if backend == "reference":  # everything is float32 there
        assert rig.generate() == RefreshRig(folder, backend=backend).generate()
    else:
        assert {"w4", "w8", "f32"} <= {kind for kinds in formats.values() for kind in kinds}
