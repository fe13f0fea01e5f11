"""The offline `LLM` on a tiny random model: order, batching, validation, streaming, and the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import CheckpointError, ConfigError, ContextLengthExceeded, InvalidRequest, Unavailable

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["one", "a second prompt", [104, 105, 33], "four"]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), backend="reference-exact", max_model_len=128, kv_cache_memory="8MiB") as llm:
        yield llm


def wait_idle(llm: LLM) -> None:
    """Until the engine has nothing left, asked of the engine itself."""
    assert llm._run(llm._client.abort()) == 0


def test_info(llm: LLM) -> None:
    assert llm.info.max_model_len == 128
    assert llm.info.backend == "reference-exact"
    assert llm.info.model == "llama"


def test_outputs_come_in_the_order_of_the_prompts_and_equal_those_of_each_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [output.prompt for output in together] == ["one", "a second prompt", None, "four"]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
    assert [output.outputs[0].text for output in together] == [output.outputs[0].text for output in alone]
    assert together[2].prompt_token_ids == PROMPTS[2]
    for output in together:
        assert len(output.outputs[0].token_ids) == 8
        assert output.outputs[0].finish_reason == "length"
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
        assert output.usage.completion_tokens == 8


def test_one_string_and_no_params(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(max_tokens=2))
    assert output.prompt == "abc"
    (output,) = llm.generate("abc")  # no limit but the context
    assert len(output.prompt_token_ids) + output.usage.completion_tokens <= 128


def test_params_of_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 3)]
    outputs = llm.generate(["a", "b"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    with pytest.raises(InvalidRequest, match="2 prompts"):
        llm.generate(["a", "b"], params[:1])


def test_n_seed_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    first, again = (llm.generate("hello", params)[0] for _ in range(2))
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in first.outputs] == [choice.token_ids for choice in again.outputs]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) > 1
    for choice in first.outputs:
        assert choice.logprobs is not None
        assert [row.token_id for row in choice.logprobs] == choice.token_ids
        assert choice.cumulative_logprob == pytest.approx(sum(row.logprob for row in choice.logprobs))
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    rows = first.prompt_logprobs[1:]
    assert [row.token_id for row in rows if row is not None] == first.prompt_token_ids[1:]
    assert first.usage.completion_tokens == 12


def test_stop_string_and_stop_token(llm: LLM) -> None:
    token_ids = llm.generate("stop here", GREEDY)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(token_ids[2],))
    choice = llm.generate("stop here", params)[0].outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token_ids[2])
    assert len(choice.token_ids) == token_ids.index(token_ids[2]) + 1


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    one, two = llm.chat([messages, messages], GREEDY)
    (single,) = llm.chat(messages, GREEDY)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert one.outputs[0].token_ids == two.outputs[0].token_ids == single.outputs[0].token_ids


def test_one_bad_prompt_fails_the_call_before_anything_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._client, "submit", None)  # so that a call of it would be a TypeError
    with pytest.raises(ContextLengthExceeded):
        llm.generate(["fine", "x" * 200], GREEDY)
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate("x", SamplingParams(temperature=-1.0))
    with pytest.raises(InvalidRequest, match="token id"):
        llm.generate([[100_000]], GREEDY)
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat([[]], GREEDY)
    assert llm.chat([], GREEDY) == []


def test_stream_gives_the_same_as_generate(llm: LLM) -> None:
    deltas = list(llm.stream("stream me", GREEDY))
    choice = llm.generate("stream me", GREEDY)[0].outputs[0]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == choice.token_ids
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] != []


def test_leaving_a_stream_early_aborts_the_request(llm: LLM) -> None:
    stream = llm.stream("go on", SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(list(islice(stream, 2))) == 2
    stream.close()  # type: ignore[attr-defined]
    wait_idle(llm)
    with pytest.raises(InvalidRequest):
        list(llm.stream("go on", SamplingParams(top_p=2.0)))


def test_calls_from_several_threads(llm: LLM) -> None:
    expected = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def call(index: int) -> None:
        found[index] = llm.generate([PROMPTS[index]], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(PROMPTS))] == expected


def test_options_that_cannot_work(tiny_model: Path, tmp_path: Path) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(tiny_model), max_modl_len=3)
    with pytest.raises(ConfigError, match="--max-model-len"):
        LLM(str(tiny_model), max_model_len=1_000_000)
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path))
    assert threading.active_count() == num_threads


def test_close_is_idempotent_and_final(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), kv_cache_memory="8MiB", max_model_len=64)
    num_threads = threading.active_count()
    llm.close()
    llm.close()
    assert threading.active_count() < num_threads
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("x", GREEDY)
    with pytest.raises(Unavailable, match="closed"):
        list(llm.stream("x", GREEDY))


def test_a_script_that_ends_without_close(tiny_model: Path) -> None:
    script = f"import headrace\nllm = headrace.LLM({str(tiny_model)!r})\nprint(len(llm.generate('one')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.real_model
def test_smollm2_knows_paris(smollm2: Path) -> None:
    with LLM(str(smollm2), kv_cache_memory="256MiB", max_model_len=1024) as llm:
        (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in output.outputs[0].text


@pytest.mark.real_model
def test_smollm2_puts_like_with_like(smollm2: Path) -> None:
    """Each sentence is nearest to the one that says the same."""
    texts = [
        "The cat sits on the mat.",
        "A cat is sitting on a rug.",
        "Stock markets fell sharply on Monday.",
        "Shares dropped a lot at the start of the week.",
        "How do I bake bread?",
        "What is a recipe for a loaf of bread?",
    ]
    with LLM(str(smollm2), kv_cache_memory="64MiB", max_model_len=256) as llm:
        for pooling in ("last", "mean"):
            vectors = np.stack([output.embedding for output in llm.embed(texts, pooling=pooling)])
            likeness = vectors @ vectors.T - 2 * np.eye(len(texts))
            assert likeness.argmax(axis=1).tolist() == [1, 0, 3, 2, 5, 4]
