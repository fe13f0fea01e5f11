"""A real trainer against a real server: after every refresh, whatever brought it, the server is the model that came.

Exact where it can be: the weights in use have the trainer's bits, and a prompt whose prefix was cached under the old
weights gives what a fresh engine gives that loaded the new ones. Within a tolerance where torch computes the other
side, and then the old weights must lie far outside of it, so that a refresh that did nothing cannot pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.testing.server import RunningServer
from headrace.testing.trainer import SOURCES, Policy, Server, Task, Trainer, create_sender
from headrace.testing.trainer.senders import save, tensors_of
from headrace.weights.incoming import tensor_checksum

pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = list(b"the wheel turns and the stone grinds, and the miller sleeps while the water runs by the mill. " * 2)
KV = "16MiB"
# The native kernels keep K and V as float16, half a thousandth of each number; in log probabilities down to -15 that
# has come to 0.01 at most. The reference kernels keep float32, and only the order of sums differs from torch's.
NATIVE, FLOAT32 = 0.03, 1e-3
PACKED = 0.1  # a mean: the kernels round activations to 8 bits per group, which gives 0.03 with the file's own weights
FAR = 10  # tolerances, at least, from the old weights to the new


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    args = [str(tiny_model), "--kv-cache-memory", KV, "--allow-pickled-weights"]
    with RunningServer(args) as running, closing(Server(running.url)) as server:
        yield server


@contextmanager
def trainer_of(
    server: Server, model: Path, source: str, *, trained: str = "", learning_rate: float = 1e-2
) -> Iterator[Trainer]:
    """A new trainer, and the server as it was at the start."""
    server.control("refresh_weights", source={"kind": "path", "path": str(model)}, version="start")
    policy = Policy(model, trained=trained, learning_rate=learning_rate)
    with closing(create_sender(source, server, model, policy.weights())) as sender:
        yield Trainer(policy, server, sender)


def distance(ours: list[float], theirs: list[float]) -> float:
    return float(np.abs(np.subtract(ours, theirs)).max())


def check_served(trainer: Trainer, version: str, before: list[float], tolerance: float = NATIVE) -> None:
    """The server has the trainer's weights; `before` are the scores of TEXT by other ones."""
    sent = {tensor.name: tensor_checksum(tensor) for tensor in tensors_of(trainer.policy.weights())}
    assert trainer.server.control("checksum")["tensors"] == sent
    scores = trainer.policy.score(TEXT)
    assert distance(scores, before) > FAR * tolerance
    assert distance(scores, trainer.server.score(TEXT)) < tolerance
    status = trainer.server.get("/v1/control/status")
    assert (status["version"], status["state"], status["refresh"]) == (version, "ready", None)


def complete(server: Server) -> dict[str, Any]:
    """Tokens after TEXT with their log probabilities, where they came from, and how much of TEXT was cached."""
    body = {"prompt": TEXT, "max_tokens": 24, "ignore_eos": True, "seed": 5, "logprobs": 0, "return_token_ids": True}
    reply = server.post("/v1/completions", json=body)
    choice = reply["choices"][0]
    return {
        "token_ids": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "version": reply["weight_version"],
        "cached": reply["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


def complete_fresh(folder: Path, **options: str) -> dict[str, Any]:
    """The same from an engine that has never had other weights."""
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5, logprobs=0)
    with LLM(str(folder), kv_cache_memory=KV, **options) as llm:
        output = llm.generate([TEXT], params)[0].outputs[0]
    assert output.logprobs is not None
    return {"token_ids": output.token_ids, "logprobs": [row.logprob for row in output.logprobs]}


@pytest.mark.parametrize("source", SOURCES)
def test_the_server_becomes_what_was_sent(source: str, server: Server, tiny_model: Path, tmp_path: Path) -> None:
    with trainer_of(server, tiny_model, source) as trainer:
        for number, version in enumerate(("start", "round-1"), 1):
            before = trainer.policy.score(TEXT)
            complete(server)
            cached = complete(server)
            assert cached["cached"] >= len(TEXT) - 16
            result = trainer.run_round()
            assert (result.version, cached["version"]) == (version, version)
            assert result.drift < NATIVE
            first, second = complete(server), complete(server)
            fresh = complete_fresh(save(tmp_path / str(number), tiny_model, trainer.policy.weights()))
            assert fresh["logprobs"] != cached["logprobs"]
            assert first == {**fresh, "version": f"round-{number}", "cached": 0}
            assert second == {**first, "cached": cached["cached"]}
            check_served(trainer, f"round-{number}", before)


def test_float32_kernels_agree_with_torch_to_a_thousandth(tiny_model: Path) -> None:
    args = [str(tiny_model), "--kv-cache-memory", KV, "--backend", "reference-exact"]
    with (
        RunningServer(args) as running,
        closing(Server(running.url)) as server,
        trainer_of(server, tiny_model, "shared_memory") as trainer,
    ):
        for number in (1, 2):
            before = trainer.policy.score(TEXT)
            assert trainer.run_round().drift < FLOAT32
            check_served(trainer, f"round-{number}", before, FLOAT32)


def test_of_each_stack_a_delta_brings_what_has_changed(server: Server, tiny_model: Path) -> None:
    """The other tensors of a stack, and all other layers, are those that serve."""
    with trainer_of(server, tiny_model, "delta", trained="layers.1.self_attn.q_proj", learning_rate=0.1) as trainer:
        before = trainer.policy.weights()
        trainer.run_round()
        operation = next(
            operation
            for operation in server.get("/v1/control/operations")["operations"]
            if operation["kind"] == "refresh_weights"
        )
        assert operation["result"][0]["num_tensors"] == 1
        after = trainer.policy.weights()
        changed = [name for name in before if not np.array_equal(before[name], after[name])]
        assert changed == ["model.layers.1.self_attn.q_proj.weight"]
        check_served(trainer, "round-1", Policy(tiny_model).score(TEXT))


def test_rounded_weights_are_those_of_a_fresh_load(tiny_model: Path, tmp_path: Path) -> None:
    """With 4-bit matrices nothing is close to torch any more, but every bit is that of a start with the same folder."""
    args = [str(tiny_model), "--kv-cache-memory", KV, "--quantization", "w4"]
    with RunningServer(args) as running, closing(Server(running.url)) as server:
        for source, trained in (("safetensors", ""), ("delta", "q_proj")):
            with trainer_of(server, tiny_model, source, trained=trained) as trainer:
                before = complete(server)
                trainer.run_round()
                after = complete(server)
                folder = save(tmp_path / source, tiny_model, trainer.policy.weights())
                assert after == {**complete_fresh(folder, quantization="w4"), "version": "round-1", "cached": 0}
                assert after["logprobs"] != before["logprobs"]


class Forgetful:
    """Says that there are new weights, and sends none."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def send(self, arrays: object, version: str) -> None:
        self._server.control("set_version", version=version)

    def close(self) -> None:
        pass


def test_a_refresh_that_brings_nothing_is_noticed(server: Server, tiny_model: Path) -> None:
    with trainer_of(server, tiny_model, "disk") as trainer:
        trainer.sender = Forgetful(server)
        before = trainer.policy.score(TEXT)
        results = list(trainer.run(12))
        assert results[0].drift < NATIVE
        assert min(result.drift for result in results[2:]) > FAR * NATIVE
        assert max(result.reward for result in results) < 0.15, "nothing is learned from the samples of other weights"
        assert distance(server.score(TEXT), before) < NATIVE
        with pytest.raises(AssertionError):
            check_served(trainer, "round-12", before)


def test_reward_rises(server: Server, tiny_model: Path) -> None:
    with trainer_of(server, tiny_model, "shared_memory") as trainer:
        results = list(trainer.run(30))
    rewards = [result.reward for result in results]
    assert np.mean(rewards[:3]) < 0.1
    assert np.mean(rewards[10:13]) > 0.4
    assert np.mean(rewards[-3:]) > 0.9
    assert [result.version for result in results] == ["start", *(f"round-{number}" for number in range(1, 30))]
    assert max(result.drift for result in results) < 2 * NATIVE  # unlikely tokens, of which single ones are far off


def test_the_way_of_the_weights_leaves_no_trace(server: Server, tiny_model: Path) -> None:
    """Sampling has seeds and sums have an order, so that another source changes no bit of a run."""
    runs = []
    for source in ("safetensors", "group"):
        with trainer_of(server, tiny_model, source) as trainer:
            runs.append([(result.reward, result.drift) for result in trainer.run(3)])
    assert runs[0] == runs[1]


def test_a_request_in_flight_says_which_weights_made_what(server: Server, tiny_model: Path) -> None:
    """Its KV is computed anew: from the refresh on, tokens are those of the new weights with all that precedes them."""
    prompt, num_tokens = TEXT[:32], 1800
    with trainer_of(server, tiny_model, "shared_memory") as trainer:
        old, new = Policy(tiny_model), trainer.policy
        task = trainer.task
        groups, _ = server.sample(task.prompts, n=task.n, num_tokens=task.num_tokens, seed=3)
        new.step(groups, [[task.reward(sample) for sample in group.samples] for group in groups])
        for _ in range(10):  # until enough tokens lie behind the refresh too: a busy machine may delay it
            trainer.sender.send(old.weights(), "old")
            with choices_of(server, prompt, num_tokens) as choices:
                parts: list[dict[str, Any]] = []
                while sum(len(part["token_ids"]) for part in parts) < 100:
                    parts.append(next(choices))
                trainer.sender.send(new.weights(), "new")
                has_crossed = server.get("/v1/control/status")["num_running"] == 1
                parts += choices
            spans: list[dict[str, Any]] = parts[-1].get("weight_versions", [])
            assert spans or not has_crossed
            if spans and spans[0]["end"] <= num_tokens - 50:
                break
        else:
            pytest.fail("ten refreshes came too late")
    border = spans[0]["end"]
    assert border >= 100
    assert spans == [
        {"version": "old", "start": 0, "end": border},
        {"version": "new", "start": border, "end": num_tokens},
    ]
    token_ids = [token_id for part in parts for token_id in part["token_ids"]]
    logprobs = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
    assert len(token_ids) == len(logprobs) == num_tokens
    for policy, is_new in ((old, False), (new, True)):
        differences = np.abs(np.subtract(policy.score(prompt + token_ids)[len(prompt) - 1 :], logprobs))
        before, after = np.mean(differences[:border]), np.mean(differences[border:])
        right, wrong = (after, before) if is_new else (before, after)
        assert right < NATIVE < FAR * NATIVE < wrong


@contextmanager
def choices_of(server: Server, prompt: list[int], num_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """The choice of each chunk of a stream, as they come."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": 5, "logprobs": 0, "stream": True}
    body["return_token_ids"] = True
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60.0) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        yield (json.loads(line)["choices"][0] for line in lines if line != "[DONE]")


@pytest.mark.real_model
@pytest.mark.timeout(120)
def test_smollm2_in_packed_form_takes_what_transformers_trains(smollm2: Path) -> None:
    """The served file has 4- and 8-bit matrices under llama.cpp's names; what comes is bfloat16 under transformers'.

    Norms learn, which stay floats: of a matrix, changes below its 4-bit steps would be rounded away.
    """
    prompt = "The river carries water to the wheel, and the wheel turns the stone. The miller"
    with (
        RunningServer([str(smollm2), "--kv-cache-memory", "64MiB"]) as running,
        closing(Server(running.url)) as server,
    ):
        token_ids = server.post("/tokenize", json={"prompt": prompt})["tokens"]
        policy = Policy(smollm2, trained="norm")
        task = Task(prompts=(tuple(token_ids[:8]),), wanted=frozenset(range(1000)), n=4, num_tokens=6, dtype="bfloat16")
        with closing(create_sender("shared_memory", server, smollm2, {})) as sender:
            trainer = Trainer(policy, server, sender, task)
            before = policy.score(token_ids)
            for version in ("0", "round-1"):
                assert mean_distance(policy.score(token_ids), server.score(token_ids)) < PACKED
                assert trainer.run_round().version == version
                after = policy.score(token_ids)
                assert mean_distance(after, before) > 5 * PACKED
                before = after
            assert mean_distance(before, server.score(token_ids)) < PACKED


def mean_distance(ours: list[float], theirs: list[float]) -> float:
    return float(np.abs(np.subtract(ours, theirs)).mean())
