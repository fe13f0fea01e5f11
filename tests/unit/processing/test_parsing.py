"""The choice of parsers: by name, from the chat template, from a user's file; and which special tokens stay visible."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from headrace.client.base import Delta
from headrace.config.options import ParsingConfig
from headrace.errors import ConfigError, InvalidRequest
from headrace.processing.chat_template import ChatTemplate
from headrace.processing.outputs import ChoiceAssembler, TextDelta
from headrace.processing.parsing import Parsing, load_parsing
from headrace.processing.pieces import byte_alphabet
from headrace.processing.tokenizer import Tokenizer
from headrace.testing.bytes import byte_tokenizer
from headrace.types import FinishReason, GrammarSpec, SamplingParams, ThinkingBudget

TOOLS = [{"type": "function", "function": {"name": "f"}}, {"function": 3}, "odd"]

PLUGIN = '''
from headrace.processing.reasoning import Phase, Split
from headrace.processing.tools import ToolCallDelta, ToolOutput


class Shouting:
    """Upper case is thought."""

    markers = ()
    phase, has_thought, num_held = Phase.THINKING, True, 0

    def __init__(self, opening):
        pass

    def feed(self, text):
        return Split("".join(filter(str.isupper, text)), "".join(c for c in text if not c.isupper()))

    def finish(self):
        return Split("", "")


class Bang:
    """Each exclamation mark calls the first function."""

    markers = ()

    def __init__(self, tool_names):
        self.name, self.count = min(tool_names), 0

    def feed(self, text):
        out = ToolOutput(text.replace("!", ""))
        for _ in range(text.count("!")):
            out.calls.append(ToolCallDelta(self.count, f"id{self.count}", self.name, "{}"))
            self.count += 1
        return out

    def finish(self):
        return ToolOutput()


def register(registry):
    registry.add_reasoning("shouting", Shouting)
    registry.add_tools("Bang-Bang", Bang)
'''


def load(template: str | None = None, **options: str | tuple[str, ...]) -> Parsing:
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = ChatTemplate(template)
    return load_parsing(ParsingConfig(**options), tokenizer)  # type: ignore[arg-type]


def run(
    parsing: Parsing, text: str, *, tools: object = None, is_parallel: bool = True, **params: object
) -> tuple[TextDelta, int]:
    """What the text becomes, token by token, put together again, and the number of reasoning tokens."""
    reply = parsing.of_request("", tools=tools, is_parallel=is_parallel)  # type: ignore[arg-type]
    assembler = ChoiceAssembler(byte_tokenizer(), [65], SamplingParams(**params), reply)  # type: ignore[arg-type]
    total = TextDelta(0)
    total.calls = []
    deltas = [assembler.push(Delta(0, [token_id])) for token_id in text.encode()]
    for delta in [*deltas, assembler.push(Delta(0, finish_reason=FinishReason.STOP))]:
        total.text, total.reasoning = total.text + delta.text, total.reasoning + delta.reasoning
        total.token_ids += delta.token_ids
        total.calls += delta.calls
        total.finish_reason = total.finish_reason or delta.finish_reason
    return total, assembler.num_reasoning_tokens


def test_without_parsers_replies_stay_as_they_are() -> None:
    for parsing in (load(), load("<think> <tool_call>", reasoning_parser="none", tool_parser="none")):
        assert parsing.of_request("", tools=TOOLS) is None
    assert load(tool_parser="hermes").of_request("", tools=None) is None
    assert load(tool_parser="hermes").of_request("", tools=TOOLS) is not None


def test_auto_reads_the_template() -> None:
    reply = load("<think>{{ enable_thinking }}<tool_call>").of_request("", tools=TOOLS)
    assert reply is not None
    assert reply.reasoning is not None
    assert reply.tool_parser() is not None
    assert reply.offered == {"f": None}


@pytest.mark.parametrize("option", ["reasoning_parser", "tool_parser"])
def test_unknown_names_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="not 'guess'"):
        load(**{option: "guess"})


def test_names_may_have_dashes() -> None:
    assert load(reasoning_parser="ernie-x1").has_reasoning


def test_a_plugin_adds_parsers(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    parsing = load(plugin=(str(path),), reasoning_parser="shouting", tool_parser="bang_bang")
    out, _ = run(parsing, "aBc!!", tools=TOOLS)
    assert (out.text, out.reasoning, [call.id for call in out.calls]) == ("ac", "B", ["id0", "id1"])


@pytest.mark.parametrize(
    "source", ["1 / 0", "import nothing_like_this", "def register(registry, more): ...", "x = (", ""]
)
def test_a_plugin_that_fails_says_so(tmp_path: Path, source: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=r"--plugin .*mine\.py"):
        load(plugin=(str(path),))
    with pytest.raises(ConfigError, match="no such file"):
        load(plugin=(str(tmp_path / "none.py"),))


def test_the_prompt_decides_even_as_token_ids() -> None:
    parsing = load(reasoning_parser="think")
    for prompt in ("Hi<think>\n", list(b"Hi<think>\n")):
        reply = parsing.of_request(prompt)
        assert reply is not None
        parser = reply.reasoning_parser()
        assert parser is not None
        assert parser.feed("so") == ("so", "")


def test_stop_strings_are_looked_for_in_the_answer_alone() -> None:
    parsing = load(reasoning_parser="think")
    out, _ = run(parsing, "<think>STOP it</think>ok STOP more", stop=("STOP",))
    assert (out.reasoning, out.text, out.finish_reason) == ("STOP it", "ok ", FinishReason.STOP)
    assert bytes(out.token_ids).decode() == "<think>STOP it</think>ok "
    # nothing was thought, and the match is the first thing that is said
    for text in ("STOP", "  STOP", "<thSTOP"):
        out, _ = run(parsing, text + " more", stop=("STOP",))
        assert bytes(out.token_ids).decode() == out.text == text.removesuffix("STOP")


def test_reasoning_tokens_are_counted_without_what_comes_after() -> None:
    parsing = load(reasoning_parser="think")
    out, num_reasoning = run(parsing, "<think>why</think>Yes")
    assert num_reasoning == len("why</think")  # a byte is a token: the last one of a marker decides
    assert bytes(out.token_ids).decode() == "<think>why</think>Yes"
    assert run(parsing, "Yes")[1] == 0


def test_only_the_first_call_without_parallel_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    out, _ = run(load(tool_parser="hermes"), f"a{call}{call}b", tools=TOOLS, is_parallel=False)
    assert (out.text, {delta.index for delta in out.calls}) == ("ab", {0})
    out, _ = run(load(tool_parser="hermes"), call * 2, tools=TOOLS)
    assert {delta.index for delta in out.calls} == {0, 1}


@pytest.mark.parametrize("scheme", ["byte_level", "byte_fallback", "other"])
def test_special_tokens_that_are_markers_are_seen_and_others_not(scheme: str) -> None:
    vocabulary = {"<think>": 0, "</think>": 1, "<eot>": 2, "a": 3, "b": 4, "[UNK]": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.add_special_tokens(["<think>", "</think>", "<eot>"])
    decoders = tokenizers.decoders
    if scheme == "byte_level":
        backend.decoder = decoders.ByteLevel()
    elif scheme == "byte_fallback":
        backend.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    parsing = load_parsing(ParsingConfig(reasoning_parser="think"), tokenizer)
    assembler = ChoiceAssembler(tokenizer, [3], SamplingParams(), parsing.of_request(""))
    deltas = [assembler.push(Delta(0, [token_id])) for token_id in (0, 3, 2, 1, 4, 2)]
    deltas.append(assembler.push(Delta(0, finish_reason=FinishReason.STOP)))
    assert "".join(delta.reasoning for delta in deltas).strip() == "a"
    assert "".join(delta.text for delta in deltas).strip() == "b"
    assert assembler.num_reasoning_tokens == 2
    assert [token_id for delta in deltas for token_id in delta.token_ids] == [0, 3, 2, 1, 4, 2]


def test_a_budget_of_thoughts_is_the_markers_ids() -> None:
    parsing = load(reasoning_parser="think")
    close_ids = tuple(b"</think>")
    budget = parsing.thinking_budget(parsing.of_request("Hi <think>\n"), 5, "f")
    assert budget == ThinkingBudget(True, tuple(b"<think>"), close_ids, 5)
    budget = parsing.thinking_budget(parsing.of_request("Hi"), 0, "f")
    assert budget is not None
    assert (budget.is_open, budget.max_tokens) == (False, 0)
    assert parsing.thinking_budget(parsing.of_request("<think></think>"), 5, "f") is None


def test_what_has_no_markers_that_are_tokens_has_no_budget(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    for parsing in (load(), load(plugin=(str(plugin),), reasoning_parser="shouting")):
        with pytest.raises(InvalidRequest, match="--reasoning-parser") as caught:
            parsing.thinking_budget(parsing.of_request("x"), 5, "reasoning_max_tokens")
        assert caught.value.param == "reasoning_max_tokens"
    # A vocabulary in which the marker's last character may be one token with what follows it.
    vocabulary = {**byte_alphabet(), ">Ċ": 256}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[(">", "Ċ")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parsing = load_parsing(ParsingConfig(reasoning_parser="think"), Tokenizer(backend))
    with pytest.raises(InvalidRequest, match="<think> is not made of tokens of its own"):
        parsing.thinking_budget(parsing.of_request("x"), 5, "f")
    backend.add_special_tokens(["<think>", "</think>"])
    parsing = load_parsing(ParsingConfig(reasoning_parser="think"), Tokenizer(backend))
    budget = parsing.thinking_budget(parsing.of_request("x"), 5, "f")
    assert budget == ThinkingBudget(False, (257,), (258,), 5)


@pytest.mark.parametrize("name", ["deepseek_r1", "ernie_x1", "gemma4", "shouting"])
def test_a_form_binds_the_answer_where_thoughts_have_markers(name: str, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    reply = load(plugin=(str(plugin),), reasoning_parser=name).of_request("x")
    assert reply is not None
    kind = reply.answer_form(GrammarSpec("regex", "a")).kind
    assert kind == ("regex" if name == "shouting" else "after_thoughts")
