"""Control operations of every kind beside requests, aborts and dying senders, on real processes: each request ends
once, with tokens of the weights that it names; nothing hangs, leaks or stays behind. `headrace.testing.chaos` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.testing.chaos import MAX_TOKENS, PROMPTS, Chaos, Outcome
from headrace.testing.processes import eventually
from headrace.testing.server import RunningServer
from headrace.testing.tiny import write_safetensors, write_tiny_model
from headrace.weights.safetensors import read_folder

SEED = 20_261_130
NUM_ROUNDS = 300
WARM_UP = 100  # rounds until memory and descriptors are looked at for the first time
GROWTH_BYTES = {"headrace.engine.process": 24 << 20, "headrace.server.process": 16 << 20}
ERRORS = {"asleep", "weights_poisoned", "deadline_exceeded"}  # that may end a request
SHARED_MEMORY = Path("/dev/shm")

Continue = Callable[[str, list[int], int], list[int]]
"""(model, token ids, number of tokens): what the model generates, alone and with nothing else in its life."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {letter: write_tiny_model(root / letter, seed=seed) for seed, letter in enumerate("abc")}
    for folder in folders.values():
        tensors = list(read_folder(folder).values())
        for name, part in (("first", tensors[::2]), ("second", tensors[1::2])):
            write_safetensors(folder / f"{name}.safetensors", part)
    return folders


@pytest.fixture(scope="module")
def go_on(models: dict[str, Path]) -> Iterator[Continue]:
    engines = {letter: LLM(str(folder), kv_cache_memory="8MiB", threads=1) for letter, folder in models.items()}

    def go_on(model: str, token_ids: list[int], num_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        (output,) = engines[model].generate([token_ids], params)
        return output.outputs[0].token_ids

    yield go_on
    for engine in engines.values():
        engine.close()


async def test_everything_at_once(models: dict[str, Path], go_on: Continue) -> None:
    options = ["--api-servers", "2", "--kv-cache-memory", "8MiB", "--refresh-timeout", "0.3", "--threads", "1"]
    before = leftovers()
    with RunningServer([str(models["a"]), *options]) as server:
        try:
            chaos = Chaos(server.url, models, SEED)
            async with chaos.connected():
                await chaos.commit("refresh_weights", "a-0-keep", source={"kind": "path", "path": str(models["a"])})
                await chaos.run_rounds(range(WARM_UP))
                await chaos.quiesce()
            first = usage(server)
            async with chaos.connected():
                await chaos.run_rounds(range(WARM_UP, NUM_ROUNDS))
                await chaos.quiesce()
                await chaos.commit("refresh_weights", "c-last-keep", source={"kind": "path", "path": str(models["c"])})
                chaos.submit(is_patient=True)
                await chaos.collect()
            assert chaos.outcomes[-1].version == "c-last-keep"
            check_usage(server, first)
            eventually(lambda: leftovers() <= before, what="no file in shared memory is left")
            check_outcomes(chaos, go_on)
        except BaseException:
            print(f"seed {SEED}, round {chaos.round}; {chaos.counts}")
            raise
        assert "Traceback" not in "".join(server.output)


# -------------------------------------------------------------------------------------------------------- what was told


def check_outcomes(chaos: Chaos, go_on: Continue) -> None:
    whole = {(model, i): go_on(model, PROMPTS[i], MAX_TOKENS) for model in chaos.models for i in range(len(PROMPTS))}
    until = {}  # label -> when the next one was certainly there
    commits = sorted(chaos.commits, key=lambda commit: commit.epoch)
    for commit, following in zip(commits, [*commits[1:], None], strict=True):
        until[commit.label] = float("inf") if following is None else following.answered_s
    since = {commit.label: commit.called_s for commit in commits}
    for outcome in chaos.outcomes:
        assert len(outcome.finishes) + len(outcome.errors) == 1, outcome
        assert set(outcome.errors) <= ERRORS, outcome
        if outcome.errors or not outcome.token_ids:
            continue
        check_tokens(outcome, whole, go_on)
        for span in spans_of(outcome):
            assert since[span["version"]] <= outcome.ended_s, "a version that was not there yet"
            assert until[span["version"]] >= outcome.started_s, "a version that was gone"


def spans_of(outcome: Outcome) -> list[dict[str, Any]]:
    return outcome.spans or [{"version": outcome.version, "start": 0, "end": len(outcome.token_ids)}]


def check_tokens(outcome: Outcome, whole: dict[tuple[str, int], list[int]], go_on: Continue) -> None:
    """The first span is what its model gives; so is a later one whose commit computed the KV anew."""
    tokens, spans = outcome.token_ids, spans_of(outcome)
    assert outcome.finishes == ["abort"] or len(tokens) == outcome.max_tokens
    assert spans[-1]["version"] == outcome.version
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == len(tokens)
    end = spans[0]["end"]
    assert tokens[:end] == whole[spans[0]["version"][0], outcome.prompt][:end], outcome
    for span in spans[1:]:
        model, _, kv = span["version"].split("-")
        start, end = span["start"], span["end"]
        if kv == "recompute":
            assert tokens[start:end] == go_on(model, [*PROMPTS[outcome.prompt], *tokens[:start]], end - start), outcome


# -------------------------------------------------------------------------------------------------------- what is left


def usage(server: RunningServer) -> dict[int, tuple[str, int, int]]:
    """By process: its module, resident bytes, and open descriptors."""
    return {
        process.pid: (module, process.memory_info().rss, process.num_fds())
        for module in GROWTH_BYTES
        for process in server.children(module)
    }


def check_usage(server: RunningServer, first: dict[int, tuple[str, int, int]]) -> None:
    last = usage(server)
    assert last.keys() == first.keys(), "a process was started again"
    for pid, (module, num_bytes, _) in last.items():
        grown = num_bytes - first[pid][1]
        assert grown < GROWTH_BYTES[module], f"{module} has grown by {grown} bytes"
    eventually(
        lambda: all(fds <= first[pid][2] + 2 for pid, (*_, fds) in usage(server).items()), what="few descriptors"
    )


def leftovers() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("headrace-*")}
