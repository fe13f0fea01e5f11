"""Texts that are much too long are refused by their length: to tokenise 10 MB takes seconds of a thread."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config.options import AdmissionConfig
from headrace.errors import ContextLengthExceeded
from headrace.processing.inputs import DENSE_CHARS, ChatInput, InputProcessor, Prompt
from headrace.processing.tokenizer import Tokenizer
from headrace.testing.bytes import byte_tokenizer
from headrace.transport.messages import EngineInfo
from headrace.types import RequestId, SamplingParams

LIMIT = 100
INFO = EngineInfo(
    model="m", vocab_size=260, max_model_len=LIMIT, max_num_seqs=8, block_size=16, num_blocks=100, backend="b"
)


class Unread(Tokenizer):
    """Must not be asked to encode."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("a text was tokenised")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=" ab\nhelo\u00e9\u4f60\U0001f600<think>", max_size=60))
def test_no_text_has_fewer_tokens_than_its_length_says(any_tokenizer: Tokenizer, text: str) -> None:
    assert any_tokenizer.least_tokens(text) <= len(any_tokenizer.encode(text, add_special_tokens=False))


def test_the_bound_follows_the_longest_token(byte_level: Tokenizer) -> None:
    longest = max(len(token) for token in byte_level.backend.get_vocab())
    assert byte_level.least_tokens("x" * 10_000) == 10_000 // longest


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        (tokenizers.normalizers.Replace(" ", "\u2581"), 1000),
        (tokenizers.normalizers.NFC(), 250),
        (tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC(), tokenizers.normalizers.Prepend("_")]), 250),
        (tokenizers.normalizers.Replace(tokenizers.Regex(" +"), " "), 0),
        (tokenizers.normalizers.Strip(), 0),
    ],
)
def test_a_normaliser_that_shortens_texts_says_less(normalizer: object, expected: int) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.normalizer = normalizer
    longest = len("<|im_start|>")
    assert tokenizer.least_tokens("x" * 1000 * longest) == expected


@pytest.mark.parametrize("is_chat", [False, True])
async def test_they_are_refused_unread(is_chat: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = Unread
    inputs = InputProcessor(tokenizer, AdmissionConfig())
    text = "y" * 1_000_000
    source: ChatInput | list[Prompt] = ChatInput(messages=[{"role": "user", "content": text}]) if is_chat else [text]
    with pytest.raises(ContextLengthExceeded, match=r"at least \d+ tokens") as caught:
        await inputs.prepare(source, SamplingParams(), INFO, RequestId(1))
    assert caught.value.param == ("messages" if is_chat else "prompt")
    inputs.close()


async def test_what_might_fit_is_counted_and_so_is_what_only_wants_counting() -> None:
    inputs = InputProcessor(byte_tokenizer(), AdmissionConfig())
    with pytest.raises(ContextLengthExceeded, match=rf"has {DENSE_CHARS * LIMIT} tokens"):
        await inputs.prepare(["y" * DENSE_CHARS * LIMIT], SamplingParams(), INFO, RequestId(1))
    assert len(await inputs.tokenize("y" * 100_000)) == 100_000
    inputs.close()
