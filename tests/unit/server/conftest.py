"""Fixtures of the HTTP layer's tests; the fakes are in `headrace.testing.front_end`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from headrace.processing.tokenizer import Tokenizer
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.echo_app import echo_app
from headrace.testing.front_end import FrontEnd, make_front_end


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., FrontEnd]]:
    """`make_front_end`, with everything closed at the end."""
    opened: list[FrontEnd] = []

    def make(**options: Any) -> FrontEnd:
        opened.append(make_front_end(**options))
        return opened[-1]

    yield make
    for front_end in opened:
        await front_end.close()


@pytest.fixture
def front_end(make: Callable[..., FrontEnd]) -> FrontEnd:
    return make()


@pytest.fixture
def without_template() -> Tokenizer:
    """A base model's tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """The whole application on the mock engine, which has nothing left to do at the end."""
    async with echo_app() as http:
        yield http
