"""Refreshes that fail, on tiny real models: old weights serve on or none do, and the error says which tensor it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.options import ControlConfig
from headrace.errors import FailedRequest
from headrace.testing.refresh_rig import PROMPT, RefreshRig, raw_source
from headrace.testing.tiny import write_tiny_model
from headrace.weights.safetensors import read_folder
from headrace.weights.tensor import CheckpointTensor


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
