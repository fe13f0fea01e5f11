"""Each trainer's own order of calls against a live server: what it is told, and what serves afterwards."""

from __future__ import annotations

import base64
import importlib.util
import pickle  # noqa: TID251  (the trainer's side)
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.testing.server import RunningServer
from headrace.testing.tiny import write_tiny_model
from headrace.testing.torch_sender import Sending, TorchSender, pattern
from headrace.testing.trainer_clients import (
    Areal,
    ArealVllm,
    CheckpointEngine,
    FastDeploy,
    LmDeploy,
    OpenRlhf,
    Slime,
    Trainer,
    TrlAsync,
    Verl,
)
from headrace.testing.trainer_clients.base import lists
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.incoming.raw import Manifest

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
FIRST = Manifest(names=("a", "b"), dtypes=("float32", "bfloat16"), shapes=((2, 3), (5,)))
SECOND = Manifest(names=("c",), dtypes=("float32",), shapes=((4,),))
BOTH = Manifest(
    names=FIRST.names + SECOND.names, dtypes=FIRST.dtypes + SECOND.dtypes, shapes=FIRST.shapes + SECOND.shapes
)
Status = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(["--mock-engine", "--mock-step-delay", "0.002", "--allow-pickled-weights"]) as running:
        yield running


@pytest.fixture(scope="module")
def sender() -> Iterator[TorchSender]:
    with TorchSender() as sender:
        yield sender


def status(server: RunningServer) -> Status:
    found: Status = server.get("/v1/control/status").json()
    return found


def check_settled(server: RunningServer) -> Status:
    """Nothing is left of the update."""
    found = status(server)
    assert (found["state"], found["is_paused"], found["asleep"], found["refresh"]) == ("ready", False, [], None)
    return found


def check_serving(server: RunningServer) -> Status:
    """And the server generates."""
    found = check_settled(server)
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=30.0)
    assert reply.status_code == 200, reply.text
    return found


def check_tensor(trainer: Trainer, name: str, shape: tuple[int, ...], start: int) -> None:
    values = trainer.post("/get_weights_by_name", {"name": name, "truncate_size": 100})
    assert values == pattern(shape, start).reshape(-1).tolist()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def sendings(*manifests: Manifest, load_format: str | None = None) -> list[Sending]:
    return [Sending(manifest=manifest, load_format=load_format) for manifest in manifests]


@needs_torch
@pytest.mark.parametrize("kind", [Slime, Areal, ArealVllm])
def test_buckets_through_a_group(server: RunningServer, sender: TorchSender, kind: type[Any]) -> None:
    """Twice, over the same group. The mock engine misses no tensor, so what waits for the end waits on purpose."""
    name, port = f"group-{kind.__name__}", free_port()
    sender.start_group(name, port, sendings(FIRST, SECOND, FIRST, SECOND))
    before = status(server)["epoch"]
    with kind(server.url) as trainer:
        trainer.connect(port, name)
        for number in (1, 2):
            trainer.update([FIRST, SECOND], name)
            assert check_serving(server)["epoch"] == before + number
        check_tensor(trainer, "a", (2, 3), 0)
        check_tensor(trainer, "c", (4,), 0)


@needs_torch
def test_trl_async(server: RunningServer, sender: TorchSender) -> None:
    port = free_port()
    sender.start_group("weight_update_group", port, sendings(FIRST, SECOND, load_format="packed"))
    with TrlAsync(server.url) as trainer:
        trainer.connect(port)
        assert trainer.max_model_len() > 0
        for manifest in (FIRST, SECOND):
            version = trainer.get("/weight_info")["weight_version"]
            assert trainer.update(manifest) == [200] * 5
            assert trainer.get("/weight_info")["weight_version"] != version
        check_serving(server)
        check_tensor(trainer, "c", (4,), 0)


def test_trl_async_without_a_group_goes_on_with_the_old_weights(server: RunningServer) -> None:
    with TrlAsync(server.url) as trainer:
        trainer.post("/destroy_weights_update_group", {})
        before = status(server)["version"]
        pause, start, update, finish, resume = trainer.update(FIRST)
        assert (pause, start, resume) == (200, 200, 200)
        assert (update >= 400, finish) == (True, 409)
        assert check_serving(server)["version"] == before


@needs_torch
def test_openrlhf(server: RunningServer, sender: TorchSender) -> None:
    port = free_port()
    sender.start_group("openrlhf", port, sendings(BOTH))
    with OpenRlhf(server.url) as trainer:
        trainer.connect(port)
        before = status(server)["epoch"]
        trainer.update(BOTH)
        assert check_serving(server)["epoch"] == before + 1
        check_tensor(trainer, "c", (4,), 2)


def pickles() -> list[str]:
    import torch

    named = [("a", torch.from_numpy(pattern((2, 3), 0))), ("c", torch.from_numpy(pattern((4,), 2)))]
    return [base64.b64encode(pickle.dumps([item])).decode() for item in named]


@needs_torch
def test_verl(server: RunningServer) -> None:
    with Verl(server.url) as trainer:
        trainer.before_training()
        assert sorted(status(server)["asleep"]) == ["kv_cache", "weights"]
        trainer.update(pickles())
        check_serving(server)
        check_tensor(trainer, "c", (4,), 2)


@needs_torch
def test_lmdeploy(server: RunningServer) -> None:
    with LmDeploy(server.url) as trainer:
        trainer.update(pickles())
        check_serving(server)
        check_tensor(trainer, "a", (2, 3), 0)


def test_checkpoint_engine_is_refused_and_told_what_works(server: RunningServer) -> None:
    with CheckpointEngine(server.url) as trainer:
        for response in (trainer.update(), trainer.update_sglang()):
            assert response.status_code == 400
            assert "CUDA memory" in response.text
            assert "process group" in response.text
    check_serving(server)


def test_slime_ends_its_rollouts_before_it_flushes(server: RunningServer) -> None:
    replies = []
    body = {"prompt": "x", "max_tokens": 30_000, "n": 4}

    def generate() -> None:
        replies.append(httpx.post(server.url + "/v1/completions", json=body, timeout=60.0))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    with Slime(server.url) as trainer:
        for thread in threads:
            thread.start()
        while trainer.get("/get_load")[0]["num_reqs"] < 3:
            pass
        assert trainer.http.get("/flush_cache").status_code == 400
        trainer.abort_until_idle()
        trainer.flush()
        for thread in threads:
            thread.join(30.0)
    assert len(replies) == 3
    check_serving(server)


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path) -> Iterator[RunningServer]:
    with RunningServer([str(tiny_model), "--kv-cache-memory", "16MiB"]) as running:
        yield running


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("trained") / "llama", seed=1)


@pytest.mark.parametrize("kind", [Slime, Areal, ArealVllm])
def test_from_disk(tiny_server: RunningServer, tiny_model: Path, other_model: Path, kind: type[Any]) -> None:
    with kind(tiny_server.url) as trainer:
        for model, other in ((other_model, tiny_model), (tiny_model, other_model)):
            trainer.from_disk(str(model))
            check_serving(tiny_server)
            assert trainer.post("/weight_checker", {"action": "compare", "path": str(model)})["match"] is True
            assert trainer.post("/weight_checker", {"action": "compare", "path": str(other)})["match"] is False


def test_fastdeploy(tiny_server: RunningServer, other_model: Path) -> None:
    with FastDeploy(tiny_server.url) as trainer:
        assert trainer.http.post("/v1/update_weights", json={"model_path": str(other_model)}).status_code == 409
        assert trainer.update(str(other_model), "v5")[0]["version"] == "v5"
        checksums = trainer.post("/weight_checker", {"action": "checksum"})
        trainer.sleep_and_wake()
        check_serving(tiny_server)
        assert trainer.clear_and_update() == [200, 200, 200, 200]
        check_serving(tiny_server)
        assert trainer.post("/weight_checker", {"action": "checksum"}) == checksums
        assert trainer.get("/get_weight_version") == {"weight_version": "v5"}


def halves(model: Path) -> tuple[Manifest, Manifest]:
    """All tensors of a model, in two buckets."""
    tensors = list(open_checkpoint(model).tensors.items())
    middle = len(tensors) // 2
    first, second = (
        Manifest(
            names=tuple(name for name, _ in part),
            dtypes=("float32",) * len(part),
            shapes=tuple(tensor.shape for _, tensor in part),
        )
        for part in (tensors[:middle], tensors[middle:])
    )
    return first, second


@needs_torch
def test_a_model_in_buckets_that_all_flush(tiny_server: RunningServer, tiny_model: Path, sender: TorchSender) -> None:
    """Only the bucket with which nothing is missing is served. Without the rest the old weights stay."""
    first, second = halves(tiny_model)
    port = free_port()
    sender.start_group("whole-model", port, sendings(first, first, second))
    with Slime(tiny_server.url) as trainer:
        trainer.connect(port, "whole-model")
        before = status(tiny_server)
        trainer.post("/pause_generation", {"mode": "in_place"})
        trainer.post("/update_weights_from_distributed", {**lists(first), "group_name": "whole-model"})
        failed = trainer.http.post("/continue_generation", json={})
        assert (failed.status_code, failed.json()["success"]) == (400, False)
        assert f"the old weights (version {before['version']}) serve on" in failed.json()["message"]
        assert status(tiny_server)["is_paused"]
        trainer.post("/continue_generation", {})
        assert check_serving(tiny_server)["epoch"] == before["epoch"]
        for bucket, words in ((first, "are staged"), (second, "serve as version v8")):
            body = {**lists(bucket), "group_name": "whole-model", "flush_cache": True, "weight_version": "v8"}
            assert words in trainer.post("/update_weights_from_distributed", body)["message"]
        found = check_settled(tiny_server)
        assert (found["version"], found["epoch"]) == ("v8", before["epoch"] + 1)
        name, shape = second.names[0], second.shapes[0]
        values = trainer.post("/get_weights_by_name", {"name": name, "truncate_size": 4})
        assert values == pattern(shape, 0).reshape(-1).tolist()[:4]
        trainer.from_disk(str(tiny_model))  # numbers that a model can compute with
        check_serving(tiny_server)
