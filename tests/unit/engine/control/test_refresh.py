"""Refreshing as a transaction, on tiny real models: what serves afterwards is what a fresh engine would serve."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.options import CacheConfig, ControlConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.errors import FailedRequest
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.testing.harness import EngineHarness
from headrace.testing.shared_tensors import SharedTensors
from headrace.testing.tiny import write_tiny_model
from headrace.testing.tiny_gguf import write_tiny_gguf
from headrace.types import FinishReason
from headrace.weights.incoming import tensor_checksum
from headrace.weights.safetensors import read_folder
from headrace.weights.tensor import CheckpointTensor

PROMPT = list(b"The water that turns the wheel has passed already")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder of a tiny model per seed."""
    root = tmp_path_factory.mktemp("models")
    return lambda seed: write_tiny_model(root / f"seed{seed}", seed=seed)


class RefreshRig(EngineHarness):
    """A harness on a real executor."""

    def __init__(self, path: Path, *, backend: str = "auto", **options: Any) -> None:
        super().__init__(**options)
        self.real = UniprocExecutor(path, create_backend(backend, num_threads=1))
        self.core = EngineCore(
            self.real, CacheConfig(num_kv_blocks=64), SchedulerConfig(max_num_seqs=8), 256, clock=self.clock
        )
        self.core.on_lifecycle = self.lifecycles.append
        self.state.core = self.core
        self.state.remember(path)

    def generate(self, prompt: list[int] = PROMPT, max_tokens: int = 12) -> list[int]:
        request = self.submit(prompt, max_tokens=max_tokens, temperature=0.0)
        self.run()
        assert self.choice(request).finish is FinishReason.LENGTH
        return self.choice(request).token_ids


@pytest.fixture
def rig(models: Callable[[int], Path]) -> RefreshRig:
    return RefreshRig(models(1))


@pytest.fixture(scope="module")
def fresh(models: Callable[[int], Path]) -> Callable[[int], list[int]]:
    """What a fresh engine with a model's weights generates."""
    return lambda seed: RefreshRig(models(seed)).generate()


def manifest(tensors: dict[str, CheckpointTensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [tensor.kind.label for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def raw_source(tensors: dict[str, CheckpointTensor], folder: Path) -> dict[str, Any]:
    file = folder / "body"
    file.write_bytes(b"".join(tensor.data.tobytes() for tensor in tensors.values()))
    return {"kind": "file", "file": str(file), "format": "raw", "delete": True, **manifest(tensors)}


@pytest.mark.parametrize("staged", ["always", "never"])
def test_a_cached_prompt_gives_what_a_fresh_engine_gives(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], staged: str
) -> None:
    """R1."""
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
    """R13."""
    before = rig.control("checksum")
    assert rig.control("compare", path=str(models(1))) == {"rank": 0, "match": True, "mismatches": []}
    assert rig.control("compare", path=str(models(2)))["match"] is False
    rig.control("refresh_weights", source={"kind": "path", "path": str(models(2))})
    after = rig.control("checksum")
    assert before["total"] != after["total"]
    assert before["tensors"].keys() == after["tensors"].keys() == read_folder(models(1)).keys()
    assert rig.control("compare", path=str(models(2)))["match"] is True


# ------------------------------------------------------------------------------------------------- what must not happen


def broken(tensors: dict[str, CheckpointTensor], how: str) -> dict[str, CheckpointTensor]:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensor = tensors[name]
    if how == "missing":
        return {other: tensors[other] for other in tensors if other != name}
    if how == "unknown":
        return {**tensors, "model.layers.9.self_attn.q_proj.weight": tensor}
    values = tensor.dequantize()
    if how == "shape":
        values = values.T.copy()
    if how in ("nan", "inf"):
        values.reshape(-1)[17] = np.nan if how == "nan" else np.inf
    return {**tensors, name: CheckpointTensor.from_floats(name, values)}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"1 tensors have not come: model\.layers\.1\.self_attn\.q_proj\.weight"),
        ("unknown", r"'model\.layers\.9\.self_attn\.q_proj\.weight' is unknown"),
        ("shape", r"'model\.layers\.1\.self_attn\.q_proj\.weight' has shape \[32, 64\]; \[64, 32\] is needed"),
        ("nan", r"'model\.layers\.1\.self_attn\.q_proj\.weight' holds NaN"),
        ("inf", r"'model\.layers\.1\.self_attn\.q_proj\.weight' holds NaN"),
    ],
)
@pytest.mark.parametrize("staged", ["always", "never"])
def test_a_bad_tensor_is_named_and_no_mix_ever_serves(
    rig: RefreshRig,
    models: Callable[[int], Path],
    fresh: Callable[[int], list[int]],
    tmp_path: Path,
    how: str,
    message: str,
    staged: str,
) -> None:
    """R9."""
    tensors = dict(read_folder(models(2)))
    with pytest.raises(FailedRequest, match=message):  # one call is refused before anything changes
        rig.control("refresh_weights", source=raw_source(broken(tensors, how), tmp_path), staged=staged)
    assert rig.core.lifecycle.state == "ready"
    rig.control("begin_refresh", staged=staged)
    apply = partial(rig.control, "apply_refresh", source=raw_source(broken(tensors, how), tmp_path))
    if how == "missing":
        apply()
        apply = partial(rig.control, "commit_refresh")
    with pytest.raises(FailedRequest, match=message):
        apply()
    rig.control("abort_refresh")
    if staged == "always":
        assert rig.core.lifecycle.state == "ready"
        assert rig.generate() == fresh(1)
    else:
        assert rig.core.lifecycle.state == "poisoned"
        request = rig.submit(PROMPT)
        rig.turn()
        assert (rig.choice(request).error_status, rig.choice(request).error_code) == (503, "weights_poisoned")
    assert rig.core.lifecycle.version == "0"
    rig.control("refresh_weights", source=raw_source(tensors, tmp_path))
    assert rig.core.lifecycle.state == "ready"
    assert rig.generate() == fresh(2)


def test_a_tensor_that_comes_twice(rig: RefreshRig, models: Callable[[int], Path], tmp_path: Path) -> None:
    name = "model.norm.weight"
    bucket = {name: read_folder(models(2))[name]}
    rig.control("begin_refresh")
    rig.control("apply_refresh", source=raw_source(bucket, tmp_path))
    with pytest.raises(FailedRequest, match=r"'model\.norm\.weight' came twice"):
        rig.control("apply_refresh", source=raw_source(bucket, tmp_path))
    assert rig.control("status")["refresh"]["num_tensors"] == 1


@pytest.mark.parametrize("staged", ["always", "never"])
def test_a_sender_that_goes_silent(rig: RefreshRig, fresh: Callable[[int], list[int]], staged: str) -> None:
    """R9."""
    rig.control("begin_refresh", staged=staged, silence_s=30.0)
    assert rig.core.lifecycle.state == ("ready" if staged == "always" else "updating")
    rig.clock.advance(31.0)
    rig.turn()
    assert rig.control("status")["refresh"] is None
    if staged == "always":
        assert rig.generate() == fresh(1)
    else:
        assert rig.core.lifecycle.state == "poisoned"
        assert "without a word" in str(rig.core.lifecycle.reason)
        rig.control("wake")
        with pytest.raises(FailedRequest, match="No refresh is open"):
            rig.control("commit_refresh")


def test_a_refresh_cannot_meet_another_or_a_sleep(rig: RefreshRig) -> None:
    rig.control("begin_refresh")
    for operation in ("begin_refresh", "sleep"):
        with pytest.raises(FailedRequest) as caught:
            rig.control(operation)
        assert (caught.value.info().status, caught.value.info().code) == (409, "refresh_open")
    assert rig.control("abort_refresh")["state"] == "ready"
    assert rig.control("abort_refresh")["state"] == "ready"


def test_another_model_is_refused_before_weights_go(rig: RefreshRig, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", num_layers=3)
    for path, message in ((other, "num_layers is 3"), (tmp_path / "none", "no such file")):
        with pytest.raises(FailedRequest, match=message):
            rig.control("refresh_weights", source={"kind": "path", "path": str(path)})
        assert rig.core.lifecycle.state == "ready"


def test_pickles_need_leave(rig: RefreshRig, tmp_path: Path) -> None:
    file = tmp_path / "pickle"
    file.write_bytes(b"\x80\x04N.")
    source = {"kind": "file", "file": str(file), "format": "pickle"}
    with pytest.raises(FailedRequest, match="--allow-pickled-weights"):
        rig.control("refresh_weights", source=source)
    rig.state.config = ControlConfig(allow_pickled_weights=True)
    with pytest.raises(FailedRequest, match="pickle"):
        rig.control("refresh_weights", source=source)


# ------------------------------------------------------------------------------------------- requests across a commit


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("staged", ["always", "never"])
def test_a_request_that_crosses_a_commit(
    rig: RefreshRig, models: Callable[[int], Path], fresh: Callable[[int], list[int]], kv: str, staged: str
) -> None:
    """R1, R11."""
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


def test_a_cancelled_call_takes_its_refresh_along(
    rig: RefreshRig, fresh: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may still write to the new weights, so nobody may commit them."""
    reading, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        reading.set()
        assert go_on.wait(10)

    monkeypatch.setattr("headrace.engine.control.refresh.read_into", slow)
    rig.control("begin_refresh", silence_s=5.0)
    call = rig.start("apply_refresh", source={"kind": "path", "path": "/anywhere"})
    assert reading.wait(10)
    rig.clock.advance(60.0)
    rig.turn()
    assert rig.control("status")["refresh"] is not None, "a sender that is being read is not silent"
    rig.start("cancel")
    go_on.set()
    error = rig.answers[call].error
    assert error is not None
    assert error.code == "cancelled"
    assert rig.control("status")["refresh"] is None
    assert rig.generate() == fresh(1)


def test_files_that_changed_under_a_sleeper_do_not_wake_under_the_old_label(tmp_path: Path) -> None:
    rig = RefreshRig(write_tiny_model(tmp_path / "model", seed=1))
    rig.control("sleep")
    write_tiny_model(tmp_path / "model", seed=2)
    assert rig.control("wake")["state"] == "poisoned"
    assert "have changed since" in str(rig.core.lifecycle.reason)
    rig.control("refresh_weights", source={"kind": "path", "path": str(tmp_path / "model")})
    assert rig.core.lifecycle.state == "ready"


@pytest.mark.parametrize("what", ["another model", "a broken file", "a group that nobody joined"])
def test_in_place_a_source_is_looked_at_before_weights_go(
    rig: RefreshRig, fresh: Callable[[int], list[int]], tmp_path: Path, what: str
) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"no tensors")
    sources: dict[str, dict[str, Any]] = {
        "another model": {"kind": "path", "path": str(write_tiny_model(tmp_path / "other", hidden_size=64))},
        "a broken file": {"kind": "file", "file": str(body), "format": "safetensors"},
        "a group that nobody joined": {"kind": "group", "names": [], "dtypes": [], "shapes": []},
    }
    with pytest.raises(FailedRequest):
        rig.control("refresh_weights", source=sources[what], staged="never")
    assert rig.core.lifecycle.state == "ready"
    assert rig.generate() == fresh(1)
