"""Output that must match a grammar, on tiny models with random weights: whatever they say, it matches.

What a constrained request gets does not depend on company, chunks, preemption or new weights' arrival, and what can go
wrong with one ends that one alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace import LLM
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.processing.lark import after_thoughts, to_engine_form
from headrace.processing.vocabulary import load_vocabulary
from headrace.testing.bits import Bits, Case, CoreRun, bits
from headrace.testing.schemas import SCHEMAS
from headrace.testing.tiny import EOS, IM_END, write_tiny_model
from headrace.types import FinishReason, GrammarSpec, LogprobRows, SamplingParams, ThinkingBudget

NUM_SEEDS = 6
PERSON = GrammarSpec("json_schema", json.dumps(SCHEMAS["person"]))
DIGITS = GrammarSpec("regex", "[0-9]{3,5}x")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The head has more rows than the tokenizer's tokens have bytes: special ones, and unused ones."""
    folder = tmp_path_factory.mktemp("structured") / request.param
    write_tiny_model(folder, architecture=request.param, seed=len(request.param), vocab_size=300)
    with LLM(str(folder), num_kv_blocks=600, max_num_seqs=32) as llm:
        yield llm


def test_every_output_matches_its_schema(llm: LLM) -> None:
    names = [name for name in SCHEMAS for _ in range(NUM_SEEDS)]
    params = [
        SamplingParams(
            max_tokens=600,
            temperature=(1.0, 0.0, 3.0)[index % 3],
            top_p=(1.0, 0.5)[index % 2],
            seed=index,
            grammar=GrammarSpec("json_schema", json.dumps(SCHEMAS[name])),
        )
        for index, name in enumerate(names)
    ]
    for name, output in zip(names, llm.generate([f"say {n}" for n in range(len(names))], params), strict=True):
        choice = output.outputs[0]
        assert choice.finish_reason == "stop", name
        assert choice.token_ids[-1] in (EOS, IM_END)
        jsonschema.validate(json.loads(choice.text), SCHEMAS[name])


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (DIGITS, "[0-9]{3,5}x"),
        (GrammarSpec("regex", "(ä|ö|😀){2}|end"), "(ä|ö|😀){2}|end"),
        (GrammarSpec("lark", 'start: item ("," item){0,2}\nitem: /[a-c]+/ "!"'), "[a-c]+!(,[a-c]+!){0,2}"),
        (GrammarSpec("gbnf", 'root ::= head "-" [0-9]?\nhead ::= "a" | "b" head'), "b*a-[0-9]?"),
        (GrammarSpec("choice", json.dumps(["yes", "no", 'may"be\n'])), '(yes|no|may"be\n)'),
    ],
    ids=lambda value: value.kind if isinstance(value, GrammarSpec) else "",
)
def test_other_grammars(llm: LLM, spec: GrammarSpec, pattern: str) -> None:
    params = [SamplingParams(max_tokens=200, seed=seed, grammar=spec) for seed in range(8)]
    for output in llm.generate(["x"] * len(params), params):
        choice = output.outputs[0]
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text)
        else:
            assert choice.finish_reason == "length"


def test_structural_tags_leave_text_free_until_a_trigger(llm: LLM) -> None:
    tag = {"begin": "<f=x>", "schema": {"type": "boolean"}, "end": "</f>"}
    value = {"structures": [tag], "triggers": ["<f"]}
    spec = GrammarSpec("structural_tag", json.dumps(value))
    [output] = llm.generate(["go"], SamplingParams(max_tokens=30, grammar=spec, logit_bias={ord("<"): 100.0}))
    assert output.outputs[0].text == "<" * 30, "no trigger"
    alternating = SamplingParams(
        max_tokens=60,
        grammar=spec,
        logit_bias={ord("<"): 100.0, ord("f"): 100.0},
        bad_words_token_ids=((ord("<"),) * 2, (ord("f"),) * 2),
    )
    [output] = llm.generate(["go"], alternating)
    assert re.match(r"f?<f=x>(true|false)</f>f?<f=x>", output.outputs[0].text)


def test_the_choices_of_one_prompt_differ_and_match(llm: LLM) -> None:
    [output] = llm.generate(["n"], SamplingParams(n=5, max_tokens=300, seed=3, grammar=PERSON))
    assert len({choice.text for choice in output.outputs}) > 1
    for choice in output.outputs:
        jsonschema.validate(json.loads(choice.text), SCHEMAS["person"])


def test_an_answer_keeps_to_its_form_after_thoughts_that_were_cut_off(llm: LLM) -> None:
    form = after_thoughts(PERSON, "<think>", "</think>", is_thinking=True)
    thinking = ThinkingBudget(True, tuple(b"<think>"), tuple(b"</think>"), 5)
    params = SamplingParams(
        n=4, max_tokens=300, seed=3, grammar=to_engine_form(form, lambda _: None), thinking=thinking
    )
    [output] = llm.generate(["n"], params)
    for choice in output.outputs:
        thoughts, answer = choice.text.split("</think>", 1)
        assert 5 <= len(thoughts.encode()) <= 8  # a character is not cut
        jsonschema.validate(json.loads(answer), SCHEMAS["person"])
    free = SamplingParams(max_tokens=7, thinking=thinking, ignore_eos=True)
    [output] = llm.generate(["n"], free)
    assert output.outputs[0].token_ids[5:] == [*b"</"], "the limit of tokens holds amid the marker too"


def test_max_tokens_ends_it_by_length(llm: LLM) -> None:
    [output] = llm.generate(["n"], SamplingParams(max_tokens=2, grammar=DIGITS))
    assert output.outputs[0].finish_reason == "length"


# ---------------------------------------------------------------------------- together with other parameters


def test_a_grammar_wins_over_min_tokens_and_ignore_eos(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, min_tokens=20, ignore_eos=True, grammar=DIGITS)
    [output] = llm.generate(["m"], params)
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) < 20


def test_min_tokens_holds_where_the_grammar_could_go_on(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, min_tokens=12, grammar=GrammarSpec("regex", "[ab]*"), seed=1)
    [output] = llm.generate(["m"], params)
    assert len(output.outputs[0].token_ids) >= 12


def test_bad_words_hold_and_bias_brings_back_nothing(llm: LLM) -> None:
    grammar = GrammarSpec("regex", "[ab]{5}")
    params = SamplingParams(max_tokens=9, grammar=grammar, bad_words=("a",), logit_bias={ord("z"): 100.0})
    [output] = llm.generate(["m"], params)
    assert output.outputs[0].text == "bbbbb"


def test_where_bad_words_leave_nothing_the_request_alone_fails(llm: LLM) -> None:
    from headrace.errors import FailedRequest

    with pytest.raises(FailedRequest, match="bad_words"):
        llm.generate(["m"], SamplingParams(max_tokens=9, grammar=GrammarSpec("regex", "aa"), bad_words=("a",)))
    assert llm.generate(["m"], SamplingParams(max_tokens=9, grammar=DIGITS))[0].outputs[0].text


def test_a_stop_string_ends_it_early(llm: LLM) -> None:
    [output] = llm.generate(["m"], SamplingParams(max_tokens=20, grammar=DIGITS, stop=("x",)))
    assert re.fullmatch("[0-9]{3,5}", output.outputs[0].text)


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """The first token is forced; its log probability and the most likely ones are as if nothing was."""
    free = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    forced = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, grammar=GrammarSpec("regex", "Q"))
    (first,), (second,) = (output.outputs for output in llm.generate(["m", "m"], [free, forced]))
    assert second.text == "Q"
    assert first.logprobs
    assert second.logprobs
    assert first.logprobs[0].top == second.logprobs[0].top
    assert second.logprobs[0].logprob < first.logprobs[0].logprob


def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM) -> None:
    from headrace.errors import InvalidRequest

    with pytest.raises(InvalidRequest, match="unclosed") as caught:
        llm.generate(["m"], SamplingParams(grammar=GrammarSpec("regex", "(")))
    assert caught.value.param == "grammar"


# ------------------------------------------------------------------------------------------- same request, same bits


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Constrained ones, and free ones between them."""
    made = []
    for index, name in enumerate(["person", "array", "enum", "nested", "optional", "pattern"]):
        prompt = tuple((7 * index + n * n) % 256 for n in range(1, 6 + 3 * index))
        grammar = GrammarSpec("json_schema", json.dumps(SCHEMAS[name])) if index != 3 else None
        temperature = (1.0, 0.0)[index % 2]
        thinking = None
        if index in (3, 4):  # thoughts that are cut off, before a free answer and before one that is bound
            thinking = ThinkingBudget(True, tuple(b"<think>"), tuple(b"</think>"), 4)
        if index == 4:
            assert grammar is not None
            grammar = to_engine_form(after_thoughts(grammar, "<think>", "</think>", is_thinking=True), lambda _: None)
        params = SamplingParams(
            max_tokens=40, temperature=temperature, seed=index, logprobs=2, grammar=grammar, thinking=thinking
        )
        made.append(Case(prompt, params))
    return made


@pytest.fixture(scope="module")
def new_run(tiny_model: Path, cases: list[Case]) -> Callable[..., CoreRun]:
    def run(**options: Any) -> CoreRun:
        executor = UniprocExecutor(
            tiny_model, create_backend("reference-exact"), load_vocabulary=lambda: load_vocabulary(tiny_model)
        )
        for case in cases:
            if case.params.grammar is not None:
                executor.prepare_grammar(case.params.grammar).result()  # no loop waits for it here
        return CoreRun(executor, block_size=4, **options)

    return run


@pytest.fixture(scope="module")
def alone(new_run: Callable[..., CoreRun], cases: list[Case]) -> list[list[Bits]]:
    return [bits(new_run().run([case]))[0] for case in cases]


def test_alone_and_in_a_batch(new_run: Callable[..., CoreRun], cases: list[Case], alone: list[list[Bits]]) -> None:
    assert bits(new_run().run(cases)) == alone
    assert {choices[0][3] for choices in alone} == {int(FinishReason.STOP), int(FinishReason.LENGTH)}
    for choices in alone:
        assert isinstance(choices[0][1], LogprobRows)
        assert np.isfinite(choices[0][1].arrays()[1]).all()


@pytest.mark.parametrize("chunk", [3, 11])
def test_with_any_chunks(
    new_run: Callable[..., CoreRun], cases: list[Case], alone: list[list[Bits]], chunk: int
) -> None:
    assert bits(new_run(chunk=chunk).run(cases)) == alone


def test_after_preemptions(new_run: Callable[..., CoreRun], cases: list[Case], alone: list[list[Bits]]) -> None:
    run = new_run(num_blocks=24, prefix_cache=False)
    assert bits(run.run(cases)) == alone
    assert run.core.stats().num_preemptions > 0


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_change_of_weights_amid_an_output(
    new_run: Callable[..., CoreRun], cases: list[Case], alone: list[list[Bits]], keep_kv: bool
) -> None:
    """To the same weights here: the outputs go on where they were, in their grammars."""
    run = new_run()
    answers = [run.submit(case) for case in cases]
    for version in range(3):
        for _ in range(5):
            run.step()
        if not keep_kv:
            run.core.drop_kv()
        run.core.adopt_weights(f"v{version}", keep_kv=keep_kv)
    run.finish()
    assert bits(answers) == alone
