"""What becomes of a request on its way to `Submit`: template, ids, seeds, names, threads, and refusals on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace.config.options import AdmissionConfig
from headrace.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from headrace.processing.inputs import INLINE_CHARS, ChatInput, InputProcessor, PreparedRequest, Prompt, RequestOptions
from headrace.processing.tokenizer import Tokenizer
from headrace.testing.bytes import byte_tokenizer
from headrace.transport.messages import EngineInfo
from headrace.types import RequestId, SamplingParams

INFO = EngineInfo(
    model="m", vocab_size=260, max_model_len=100_000, max_num_seqs=8, block_size=16, num_blocks=10_000, backend="b"
)
USER = {"role": "user", "content": "Hi"}
RENDERED = "<|im_start|>user\nHi<|im_end|>\n"
Make = Callable[..., InputProcessor]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
async def make(tokenizer: Tokenizer) -> AsyncIterator[Make]:
    made: list[InputProcessor] = []

    def make(*, tokenizer: Tokenizer = tokenizer, seed: int = 0, **admission: Any) -> InputProcessor:
        made.append(InputProcessor(tokenizer, AdmissionConfig(**admission), seed=seed))
        return made[-1]

    yield make
    for inputs in made:
        inputs.close()


async def prepare(
    inputs: InputProcessor, source: ChatInput | list[Prompt], options: RequestOptions | None = None, **params: Any
) -> PreparedRequest:
    return await inputs.prepare(source, SamplingParams(**params), INFO, RequestId(7), options)


async def prepare_chat(inputs: InputProcessor, *messages: Any, **fields: Any) -> str:
    prepared = await prepare(inputs, ChatInput(messages=list(messages), **fields))
    (text,) = prepared.texts
    assert text is not None
    return text


async def test_texts_and_ids_become_prompts(make: Make) -> None:
    prepared = await prepare(make(), ["Hé", [1, 2, 3]], RequestOptions(default_max_tokens=16), n=2)
    assert prepared.submit.prompts == (tuple("Hé".encode()), (1, 2, 3))
    assert prepared.texts == ("Hé", None)
    assert prepared.submit.request_id == 7
    assert prepared.submit.params.max_tokens == 16


async def test_chat_is_rendered_with_the_model_s_template(make: Make, tokenizer: Tokenizer) -> None:
    prepared = await prepare(make(), ChatInput(messages=[USER]))
    assert prepared.texts == (RENDERED + "<|im_start|>assistant\n",)
    assert prepared.submit.prompts[0] == tuple(tokenizer.encode(prepared.texts[0], add_special_tokens=False))
    assert prepared.submit.params.max_tokens == INFO.max_model_len - len(prepared.submit.prompts[0])


async def test_generation_prompt_and_continued_message(make: Make) -> None:
    inputs = make()
    assert await prepare_chat(inputs, USER, add_generation_prompt=False) == RENDERED
    started = {"role": "assistant", "content": "Well,"}
    text = await prepare_chat(inputs, USER, started, continue_final_message=True)
    assert text == RENDERED + "<|im_start|>assistant\nWell,"
    with pytest.raises(InvalidRequest) as caught:
        await prepare_chat(inputs, USER, started, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "add_generation_prompt"


async def test_text_parts_join_and_developer_is_system(make: Make) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = await prepare_chat(make(), {"role": "developer", "content": parts}, USER, add_generation_prompt=False)
    assert text == "<|im_start|>system\na\nb<|im_end|>\n" + RENDERED


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 5, "content": "hi"}], "messages[0].role"),
        ([{"role": "a\nb", "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "", "tool_calls": 3}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, {"x": 1}]}], "messages[0].tool_calls[1]"),
        ([{"role": "assistant", "tool_calls": [None]}], "messages[0].tool_calls[0]"),
    ],
)
async def test_bad_messages_are_refused_by_path(make: Make, messages: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prepare_chat(make(), *messages)
    assert caught.value.param == param


async def test_chat_without_a_template_says_how_to_pass_one(make: Make) -> None:
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(InvalidRequest, match="--chat-template") as caught:
        await prepare_chat(make(tokenizer=bare), USER)
    assert caught.value.code == "no_chat_template"


async def test_a_request_s_template_needs_the_server_s_trust(make: Make) -> None:
    template = "{% for m in messages %}{{ m.content }}!{{ mood }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template"):
        await prepare_chat(make(), USER, chat_template=template)
    trusting = make(trust_request_chat_template=True)
    text = await prepare_chat(trusting, USER, chat_template=template, template_kwargs={"mood": "glad"})
    assert text == "Hi!glad"


async def test_template_kwargs_must_not_replace_the_messages(make: Make) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prepare_chat(make(), USER, template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"


async def test_seeds_are_drawn_when_absent_and_repeat_under_one_server_seed(make: Make) -> None:
    async def draw(inputs: InputProcessor) -> list[int | None]:
        return [(await prepare(inputs, ["x"])).submit.params.seed for _ in range(3)]

    first = await draw(make(seed=5))
    assert first == await draw(make(seed=5))
    assert len(set(first)) == 3
    assert first != await draw(make())
    assert (await prepare(make(), ["x"], seed=42)).submit.params.seed == 42


async def test_names_by_which_a_request_is_found(make: Make) -> None:
    inputs = make()
    first = (await prepare(inputs, ["x"], RequestOptions(prefix="chatcmpl", name="mine"))).submit
    second = (await prepare(inputs, ["x"], RequestOptions(prefix="chatcmpl", name="mine"))).submit
    assert first.public_id == second.public_id == "chatcmpl-mine"
    assert first.aliases[0] == second.aliases[0] == "mine"
    assert first.aliases[1] != second.aliases[1]
    unnamed = (await prepare(inputs, ["x"])).submit
    assert unnamed.public_id == f"cmpl-{unnamed.aliases[0]}"


async def test_default_deadline_applies_to_those_who_bring_none(make: Make) -> None:
    inputs = make(default_timeout_s=9.0)
    assert (await prepare(inputs, ["x"])).submit.timeout_s == 9.0
    assert (await prepare(inputs, ["x"], RequestOptions(timeout_s=2.0))).submit.timeout_s == 2.0


async def test_bad_words_and_stop_strings_reach_the_tokenizer(make: Make) -> None:
    params = (await prepare(make(), ["x"], bad_words=("no",))).submit.params
    assert params.bad_words_token_ids == (tuple(b"no"), tuple(b" no"))
    with pytest.raises(InvalidRequest) as caught:
        await prepare(make(), ["x"], stop=("x" * 65,))
    assert caught.value.param == "stop[0]"


@pytest.mark.parametrize("prompt", [5, None, {"a": 1}, [1.5], ["a"], [True], [260], [-1], []])
async def test_what_is_no_prompt_is_refused(make: Make, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prepare(make(), [prompt])
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


async def test_a_list_of_a_million_ids_is_refused_by_its_length(make: Make) -> None:
    with pytest.raises(ContextLengthExceeded, match="1000000"):
        await prepare(make(), [["not looked at"] * 1_000_000])


async def test_half_a_surrogate_pair_is_replaced(make: Make) -> None:
    prepared = await prepare(make(), ["a\ud800"])
    assert prepared.submit.prompts[0] == tuple("a\ufffd".encode())


class _Gated:
    """A tokenizer whose `encode` tells its thread and waits."""

    def __init__(self, tokenizer: Tokenizer, fail: bool = False) -> None:
        self._tokenizer = tokenizer
        self._fail = fail
        self.gate = threading.Event()
        self.threads: list[str] = []
        self.chat_template = tokenizer.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if len(text) > INLINE_CHARS:
            assert self.gate.wait(10)
        if self._fail:
            raise RuntimeError("tokenizer failed")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def test_long_texts_leave_the_loop_and_their_number_is_bounded(make: Make, tokenizer: Tokenizer) -> None:
    gated = _Gated(tokenizer)
    inputs = make(tokenizer=gated, max_queued_requests=4)  # type: ignore[arg-type]
    long: list[Prompt] = ["y" * 50_000]
    waiting = [asyncio.create_task(prepare(inputs, long)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await prepare(inputs, long)
    assert (await prepare(inputs, ["short"])).submit.prompts == (tuple(b"short"),)
    gated.gate.set()
    await asyncio.gather(*waiting)
    assert (await prepare(inputs, long)).submit.prompts  # the places are free again
    assert {name.startswith("tokenise") for name in gated.threads} == {True, False}


async def test_a_failing_tokenizer_gives_its_place_back(make: Make, tokenizer: Tokenizer) -> None:
    gated = _Gated(tokenizer, fail=True)
    gated.gate.set()
    inputs = make(tokenizer=gated, max_queued_requests=2)  # type: ignore[arg-type]
    for _ in range(5):
        with pytest.raises(RuntimeError):
            await prepare(inputs, ["y" * 50_000])


async def test_tokenize_and_detokenize(make: Make) -> None:
    inputs = make()
    ids = await inputs.tokenize("héllo")
    assert ids == list("héllo".encode())
    assert await inputs.detokenize(ids) == "héllo"
    assert await inputs.token_texts([104, 105]) == ["h", "i"]
    assert await inputs.tokenize("z" * 10_000) == [122] * 10_000


async def test_only_a_request_that_asks_for_it_is_truncated(make: Make) -> None:
    """The last tokens are kept: of texts, however long, of ids and of conversations."""
    inputs = make()
    long = "x" * 101_000 + "yz"
    for source in ([long, list(b"wxyz"), "z"], [[*(b"x" * 101_000), *b"yz"], "wyz", "z"]):
        with pytest.raises(ContextLengthExceeded):
            await prepare(inputs, source)
        prepared = await prepare(inputs, source, RequestOptions(truncate_to=2))
        assert prepared.submit.prompts == (tuple(b"yz"), tuple(b"yz"), tuple(b"z"))
    chat = ChatInput(messages=[USER], add_generation_prompt=False)
    assert (await prepare(inputs, chat, RequestOptions(truncate_to=1))).submit.prompts == (tuple(b"\n"),)
    whole = await prepare(inputs, [long], RequestOptions(truncate_to=-1))
    assert len(whole.submit.prompts[0]) == INFO.max_model_len - 1, "a token must come behind it"
    pooled = await prepare(inputs, [long], RequestOptions(truncate_to=-1), pooling="last")
    assert len(pooled.submit.prompts[0]) == INFO.max_model_len
    assert pooled.submit.params.max_tokens is None
    for bad in (0, -2, INFO.max_model_len):
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must be -1"):
            await prepare(inputs, ["x"], RequestOptions(truncate_to=bad))
