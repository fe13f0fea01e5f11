"""However a text is split into tokens, and its tokens into deltas, the stream of a chat says what the plain reply says:
content, thoughts, tool calls, log probabilities, token ids and usage. Of the split itself text and calls show nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client.base import Delta
from headrace.processing.pieces import byte_alphabet
from headrace.processing.tokenizer import Tokenizer
from headrace.testing.front_end import events, make_front_end, rows, with_info
from headrace.transport.messages import Submit
from headrace.types import FinishReason

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "\u00e9\U0001f600", "n": [1, null], "o": {}}}\n</tool_call>'
WHOLE_WORDS = (
    "<think>", "</think>", "think>", "</", "<tool", "<tool_call>", "_call>\n{", '{"name": "f", "arguments', '": {',
    "}}\n", "</tool_call>", "}\n</tool_call>\n<tool_call>", '"}', " and", "END", "ND it", "it EN", "\u00e9", "\n\n",
    "a\u00e9",
)  # fmt: skip
SPECIAL = ("<|eos|>", "<think>", "</think>")
TEXTS = ("a", " and", "it ", "\u00e9", "\U0001f600", "END", "EN", "\n", "<think>", "</think>", CALL, "<tool_call>{no")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FIELDS = {
    "tools": TOOLS,
    "logprobs": True,
    "top_logprobs": 1,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "max_tokens": 10_000,
}
CALL_ID = re.compile(r"call_[0-9a-f]+")


def make_tokenizer(has_special_markers: bool) -> Tokenizer:
    """Every byte is a token, and so is each of the words; with `has_special_markers` thoughts are marked by tokens."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    words = ["".join(letters[byte] for byte in word.encode()) for word in WHOLE_WORDS]
    vocabulary = byte_alphabet() | {word: 256 + number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = SPECIAL if has_special_markers else SPECIAL[:1]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return Tokenizer(backend, special_tokens={"eos_token": "<|eos|>"}, templates={"default": template})


TOKENIZERS = {False: make_tokenizer(False), True: make_tokenizer(True)}


def split(text: str, tokenizer: Tokenizer, wants_word: Sequence[bool]) -> list[int]:
    """A way to write `text` in tokens; `wants_word` decides in turn where a word and a byte are both possible."""
    data, ids, turn = text.encode(), [], 0
    words = {tokenizer.token_bytes(token_id): token_id for token_id in range(256, tokenizer.vocab_size)}
    while data:
        found = [word for word in words if word and data.startswith(word)]
        if found:
            word = max(found, key=len)
            turn += 1
            # What is a special token cannot come in pieces: a model that has the token says the token.
            if words[word] in tokenizer.special_token_ids or wants_word[turn % len(wants_word)]:
                ids.append(words[word])
                data = data[len(word) :]
                continue
        ids.append(data[0])
        data = data[1:]
    return ids


def script(ids: list[int], sizes: Sequence[int], reason: FinishReason) -> Any:
    """Every choice says the tokens, in deltas of these sizes; each brings the prompt's rows with its first."""

    def play(submit: Submit) -> Iterable[list[Delta]]:
        start = turn = 0
        while start < len(ids):
            part = ids[start : start + sizes[turn % len(sizes)]]
            step = []
            for choice in range(submit.params.n):
                delta = Delta(choice, list(part), logprobs=rows(part, 2))
                if turn == 0:
                    delta.prompt_logprobs, delta.num_cached_tokens = rows(submit.prompts[0][1:], 2), 1
                step.append(delta)
            start, turn = start + len(part), turn + 1
            yield step
        yield [Delta(choice, finish_reason=reason) for choice in range(submit.params.n)]

    return play


async def reply(
    ids: list[int], sizes: Sequence[int], reason: FinishReason, tokenizer: Tokenizer, body: dict[str, Any]
) -> Any:
    client = with_info(max_model_len=20_000, num_blocks=8000)
    client.script = script(ids, sizes, reason)
    front_end = make_front_end(
        client=client, tokenizer=tokenizer, parsing={"reasoning_parser": "think", "tool_parser": "hermes"}
    )
    response = await front_end.chat(**body)
    await front_end.close()
    assert response.status_code == 200, response.text
    return response


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """What a plain reply says, without what is new each time."""
    choices = []
    for choice in body["choices"]:
        message = choice["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
        choices.append(
            {
                "content": message["content"] or "",
                "reasoning": message["reasoning"] or "",
                "calls": calls,
                "finish": (choice["finish_reason"], choice["stop_reason"]),
                "logprobs": (choice["logprobs"] or {"content": []})["content"],
                "token_ids": choice["token_ids"],
            }
        )
    return {"choices": choices, **{name: body[name] for name in ("usage", "prompt_logprobs", "prompt_token_ids")}}


def joined(chunks: list[Any], n: int) -> dict[str, Any]:
    """The same of a stream, put together as a client does."""
    choices: list[dict[str, Any]] = [
        {"content": "", "reasoning": "", "calls": [], "finish": None, "logprobs": [], "token_ids": []} for _ in range(n)
    ]
    result: dict[str, Any] = {"choices": choices}
    for chunk in chunks:
        for name in ("usage", "prompt_logprobs", "prompt_token_ids"):
            if name in chunk and chunk[name] is not None:
                assert name not in result, f"{name} comes once"
                result[name] = chunk[name]
        for choice in chunk["choices"]:
            parts, delta = choices[choice["index"]], choice["delta"]
            assert parts["finish"] is None, "nothing comes after the finish"
            parts["content"] += delta.get("content") or ""
            parts["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    parts["calls"].append([call["function"]["name"], ""])
                parts["calls"][call["index"]][1] += call["function"]["arguments"]
            parts["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            parts["token_ids"] += choice.get("token_ids", [])
            if choice["finish_reason"]:
                parts["finish"] = (choice["finish_reason"], choice["stop_reason"])
    return result


@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(st.sampled_from(TEXTS), max_size=7).map("".join),
    wants_word=st.lists(st.booleans(), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    has_special_markers=st.booleans(),
    n=st.integers(1, 2),
    more=st.fixed_dictionaries(
        {}, optional={"stop": st.just(["END", "it "]), "include_stop_str_in_output": st.booleans()}
    ),
)
def test_a_stream_says_what_the_plain_reply_says(  # budget: each is a way to cut
    text: str,
    wants_word: list[bool],
    sizes: list[int],
    reason: FinishReason,
    has_special_markers: bool,
    n: int,
    more: dict[str, Any],
) -> None:
    tokenizer = TOKENIZERS[has_special_markers]
    ids = split(text, tokenizer, wants_word)
    body = {**FIELDS, **more, "n": n}

    async def run() -> tuple[Any, Any, Any]:
        plain = await reply(ids, [10_000], reason, tokenizer, body)
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        stream = await reply(ids, sizes, reason, tokenizer, streaming)
        by_byte = await reply(split(text, tokenizer, [False]), [1], reason, tokenizer, body)
        return plain.json(), events(stream), by_byte.json()

    plain, chunks, by_byte = asyncio.run(run())
    assert joined(chunks, n) == whole(plain)
    assert all(len(choice["logprobs"]) == len(choice["token_ids"]) for choice in whole(plain)["choices"])
    for choice, other in zip(whole(plain)["choices"], whole(by_byte)["choices"], strict=True):
        for name in ("content", "reasoning", "calls", "finish"):
            assert choice[name] == other[name], name
