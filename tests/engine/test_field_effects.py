"""What each field of a request does, seen from outside: the whole application on a tiny random model.

Every test compares two replies that differ in one field, or a reply with what the field promises of it. Decoding is
greedy and letters are made likely, so that texts are readable and always the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.client.inproc import InprocClient
from headrace.config.options import AdmissionConfig, CacheConfig, SchedulerConfig, ServeConfig
from headrace.engine.core import EngineCore
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.processing.tokenizer import load_tokenizer
from headrace.server.app import create_app
from headrace.testing.front_end import events, http_client
from headrace.testing.tiny import EOS

VOCAB_SIZE = 272
LETTERS = {str(token_id): 60.0 for token_id in b"abcdefghijklmnopqrstuvwxyz"}
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logit_bias": LETTERS}
MOOD = "{{ mood }}:{{ messages[0]['content'] }}"


class Server:
    """Two front ends of one engine, with other limits, on a loop of their own."""

    def __init__(self, runner: asyncio.Runner, apps: dict[str, httpx.AsyncClient]) -> None:
        self._runner = runner
        self._apps = apps

    def post(self, path: str, body: dict[str, Any], *, app: str = "default") -> httpx.Response:
        return self._runner.run(self._apps[app].post(path, json=body))

    def refused(self, path: str, body: dict[str, Any], *, app: str = "default") -> tuple[str, str]:
        """(param, message) of a 400."""
        response = self.post(path, body, app=app)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return error["param"], error["message"]

    def complete(self, *, app: str = "default", **fields: Any) -> Any:
        response = self.post("/v1/completions", {"prompt": "Once upon", **PLAIN, **fields}, app=app)
        assert response.status_code == 200, response.text
        return response.json()

    def choice(self, **fields: Any) -> Any:
        (choice,) = self.complete(**fields)["choices"]
        return choice

    def chat(self, *, app: str = "default", **fields: Any) -> Any:
        messages = [{"role": "user", "content": "Hello"}]
        response = self.post("/v1/chat/completions", {"messages": messages, **PLAIN, **fields}, app=app)
        assert response.status_code == 200, response.text
        return response.json()

    def rendered(self, **fields: Any) -> str:
        """The prompt that a conversation becomes."""
        ids = self.chat(max_tokens=1, return_token_ids=True, **fields)["prompt_token_ids"]
        response = self.post("/detokenize", {"tokens": ids})
        text: str = response.json()["prompt"]
        return text


@asynccontextmanager
async def front_ends(model: Path) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    def core() -> EngineCore:
        executor = UniprocExecutor(model, create_backend("reference-exact"))
        return EngineCore(executor, CacheConfig(num_kv_blocks=200, block_size=4), SchedulerConfig(max_num_seqs=16))

    config = ServeConfig()
    admissions = {
        "default": config.admission,
        "open": AdmissionConfig(max_logprobs=-1, trust_request_chat_template=True),
        "narrow": AdmissionConfig(max_logprobs=3),
    }
    client = InprocClient(core, config.admission)
    await client.wait_ready(30)
    tokenizer = load_tokenizer(model)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        apps = {}
        for name, admission in admissions.items():
            app = create_app(client, tokenizer, replace(config, admission=admission), served_names=("tiny",))
            stack.callback(app.state.context.inputs.close)
            apps[name] = await stack.enter_async_context(http_client(app, timeout=30))
        yield apps


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield Server(runner, runner.run(stack.enter_async_context(front_ends(tiny_model))))
        runner.run(stack.aclose())


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    """What the model says to the plain request."""
    said: str = server.choice()["text"]
    assert len(said) == 12
    assert said.isalpha()
    return said


SAMPLED = {"temperature": 1.0, "logit_bias": None}


def test_n_gives_the_choices_of_the_seeds_that_follow(server: Server) -> None:
    """Each of them ends by itself, wherever the others end."""
    fields = {**SAMPLED, "max_tokens": 40, "stop_token_ids": list(range(20)), "return_token_ids": True}
    together = server.complete(n=16, seed=100, **fields)
    choices = together["choices"]
    alone = [server.choice(seed=100 + index, **fields) for index in range(16)]
    assert [choice["index"] for choice in choices] == list(range(16))
    assert [choice["token_ids"] for choice in choices] == [choice["token_ids"] for choice in alone]
    assert [choice["finish_reason"] for choice in choices] == [choice["finish_reason"] for choice in alone]
    lengths = [len(choice["token_ids"]) for choice in choices]
    assert len(set(lengths)) > 4, "they must stop at different points for this to say anything"
    assert together["usage"]["completion_tokens"] == sum(lengths)
    assert together["usage"]["prompt_tokens"] == len("Once upon")


def test_logprobs_are_those_that_scoring_the_same_text_gives(server: Server) -> None:
    fields = {"logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = server.choice(**SAMPLED, **fields, seed=5)
    ids = [*b"Once upon", *choice["token_ids"]]
    scored = server.choice(prompt=ids, max_tokens=1, prompt_logprobs=2)["prompt_logprobs"][len("Once upon") :]
    expected = [row[str(token_id)]["logprob"] for token_id, row in zip(choice["token_ids"], scored, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_top_logprobs_are_the_likeliest_first(server: Server, num_top: int) -> None:
    choice = server.chat(**SAMPLED | {"temperature": 0}, logprobs=True, top_logprobs=num_top)["choices"][0]
    for row in choice["logprobs"]["content"]:
        values = [entry["logprob"] for entry in row["top_logprobs"]]
        assert len(values) == num_top
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)
        if num_top:
            assert values[0] == row["logprob"], "greedy takes the likeliest"


def test_all_prompt_logprobs_are_the_whole_distribution(server: Server) -> None:
    fields = {"prompt_logprobs": -1, "logprobs": -1, "max_tokens": 1, "app": "open"}
    choice = server.choice(**fields, return_tokens_as_token_ids=True)
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    assert len(rows) == len("Once upon") - 1
    for row in rows:
        assert len(row) == VOCAB_SIZE
        assert math.fsum(math.exp(entry["logprob"]) for entry in row.values()) == pytest.approx(1, abs=1e-5)
        assert sorted(entry["rank"] for entry in row.values()) == list(range(1, VOCAB_SIZE + 1))
    assert len(choice["logprobs"]["top_logprobs"][0]) == VOCAB_SIZE


@pytest.mark.parametrize(("app", "limit"), [("default", 20), ("narrow", 3)])
def test_max_logprobs_bounds_every_field_that_asks_for_some(server: Server, app: str, limit: int) -> None:
    for field in ("prompt_logprobs", "logprobs"):
        assert server.complete(**{field: limit}, app=app)["choices"]
        for count in (limit + 1, -1):
            param, message = server.refused("/v1/completions", {"prompt": "a", field: count}, app=app)
            assert param == field
            assert f"from 0 to {limit}" in message
            assert "--max-logprobs" in message
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": limit + 1}
    assert server.refused("/v1/chat/completions", chat, app=app)[0] == "top_logprobs"


def test_echo_puts_the_prompt_and_its_logprobs_before_the_output(server: Server, text: str) -> None:
    choice = server.choice(echo=True, logprobs=1)
    assert choice["text"] == "Once upon" + text
    scored = server.choice(prompt_logprobs=1)["prompt_logprobs"]
    own = [row[str(ord(letter))]["logprob"] for letter, row in zip("nce upon", scored[1:], strict=True)]
    assert choice["logprobs"]["token_logprobs"][:9] == [None, *own]
    assert choice["logprobs"]["tokens"] == list("Once upon" + text)
    assert choice["logprobs"]["text_offset"] == list(range(9 + 12))


def test_min_tokens_puts_the_end_off(server: Server) -> None:
    eager = {"ignore_eos": False, "logit_bias": {str(EOS): 100.0}, "return_token_ids": True}
    assert server.choice(**eager)["token_ids"] == [EOS]
    choice = server.choice(**eager, min_tokens=4)
    assert choice["token_ids"].index(EOS) == 4
    assert choice["finish_reason"] == "stop"
    stopped = server.choice(min_tokens=5, stop=[chr(letter) for letter in b"abcdefghijklmnop"])
    assert len(stopped["text"]) >= 5


def test_stop_ends_the_output_before_the_string(server: Server, text: str) -> None:
    stop = text[5:8]
    body = server.complete(stop=["never", stop])
    choice, end = body["choices"][0], text.index(stop)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:end], "stop", stop)
    assert body["usage"]["completion_tokens"] == end
    assert server.choice(stop="never")["text"] == text


def test_include_stop_str_in_output_keeps_it(server: Server, text: str) -> None:
    stop = text[5:8]
    choice = server.choice(stop=stop, include_stop_str_in_output=True)
    assert choice["text"] == text[: text.index(stop) + 3]
    assert choice["finish_reason"] == "stop"


def test_stop_token_ids_end_the_output_with_that_token(server: Server, text: str) -> None:
    end = text.index(text[4])
    choice = server.choice(stop_token_ids=[ord(text[4])], return_token_ids=True)
    assert choice["token_ids"] == list(text[: end + 1].encode())
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:end], "stop", ord(text[4]))


def test_bad_words_never_come(server: Server, text: str) -> None:
    letter = server.choice(bad_words=[text[0]])["text"]
    assert text[0] not in letter
    word = server.choice(bad_words=[text[3:5]])["text"]
    assert word[:4] == text[:4], "a word's beginning may come"
    assert text[3:5] not in word
    by_ids = server.choice(bad_words_token_ids=[list(text[3:5].encode())])["text"]
    assert by_ids == word


def test_logit_bias_forces_and_bans(server: Server, text: str) -> None:
    assert server.choice(logit_bias={"33": 100})["text"] == "!" * 12
    banned = server.choice(logit_bias=LETTERS | {str(ord(text[0])): -100})["text"]
    assert text[0] not in banned


def test_return_token_ids_are_the_tokens_of_prompt_and_text(server: Server, text: str) -> None:
    choice = server.choice(return_token_ids=True)
    assert bytes(choice["token_ids"]).decode() == text
    assert bytes(choice["prompt_token_ids"]).decode() == "Once upon"
    assert "token_ids" not in server.choice()
    body = server.chat(return_token_ids=True)
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert bytes(body["choices"][0]["token_ids"]).decode() == body["choices"][0]["message"]["content"]


def test_return_tokens_as_token_ids_writes_ids_for_texts(server: Server, text: str) -> None:
    logprobs = server.choice(logprobs=1, return_tokens_as_token_ids=True)["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{ord(letter)}" for letter in text]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    content = server.chat(logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    assert all(row["token"].startswith("token_id:") for row in content)


def test_prompt_token_ids_stand_for_the_prompt(server: Server, text: str) -> None:
    assert server.choice(prompt="something else", prompt_token_ids=list(b"Once upon"))["text"] == text
    rendered = server.chat(return_token_ids=True)
    body = server.chat(prompt_token_ids=rendered["prompt_token_ids"], messages=None)
    assert body["choices"][0]["message"]["content"] == rendered["choices"][0]["message"]["content"]


def test_continue_final_message_leaves_it_open(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well, "}]
    closed = server.rendered(messages=messages)
    assert closed.endswith("Well, <|im_end|>\n<|im_start|>assistant\n")
    opened = server.rendered(messages=messages, continue_final_message=True)
    assert opened.endswith("<|im_start|>assistant\nWell, ")
    assert closed.startswith(opened)


def test_chat_template_kwargs_reach_the_template(server: Server) -> None:
    for mood in ("calm", "wild"):
        fields = {"chat_template": MOOD, "chat_template_kwargs": {"mood": mood}, "app": "open"}
        assert server.rendered(**fields) == f"{mood}:Hello"


def test_cache_salt_parts_the_prefix_cache(server: Server) -> None:
    def num_cached(salt: str | None) -> int:
        body = server.complete(prompt="a prompt of more than a few blocks", cache_salt=salt)
        found: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [num_cached(salt) for salt in (None, "mine", "yours")] == [0, 0, 0]
    assert all(num_cached(salt) >= 32 for salt in (None, "mine", "yours"))


def test_timeout_s_ends_a_request_that_runs_too_long(server: Server) -> None:
    fields = {"max_tokens": 1500, "timeout_s": 0.1}
    response = server.post("/v1/completions", {"prompt": "x", **PLAIN, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (504, "timeout_error", "deadline_exceeded")
    stream = server.post("/v1/completions", {"prompt": "x", **PLAIN, **fields, "stream": True})
    if stream.status_code == 200:  # its headers go with the first token
        assert events(stream)[-1]["error"]["code"] == "deadline_exceeded"
    assert server.choice(timeout_s=30)["finish_reason"] == "length"
