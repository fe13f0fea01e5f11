"""A request's place in the queue is given back whatever fails on its way: template, tokenizer, engine, client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.processing.tokenizer import Tokenizer
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.channel import open_rig
from headrace.testing.front_end import make_front_end


class Fragile(Tokenizer):
    """Fails for one text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "break" in text:
            raise RuntimeError("injected")
        return super().encode(text, add_special_tokens=add_special_tokens)


REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "fine", "n": 3}, 200),
    ("/v1/completions", {"prompt": "fine", "n": 3, "stream": True}, 200),
    ("/v1/completions", {"prompt": "break"}, 500),
    ("/v1/completions", {"prompt": ["fine", "break"], "n": 2, "stream": True}, 500),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 400),  # there is no template
    ("/v1/completions", {"prompt": "fine", "max_tokens": 30_000, "timeout_s": 0.05, "n": 2}, 504),
    ("/v1/completions", {"prompt": [[1], [1 << 20]], "n": 2}, 400),
]


@pytest.mark.parametrize("kind", ["inproc", "zmq"])
async def test_permits_return_whatever_fails(kind: str) -> None:
    async with open_rig(kind) as rig:
        tokenizer = byte_tokenizer()
        tokenizer.__class__, tokenizer.chat_template = Fragile, None
        front_end = make_front_end(client=rig.client, tokenizer=tokenizer)  # type: ignore[arg-type]  # a real one
        try:
            for path, body, status in REQUESTS * 3:
                response = await front_end.post(path, {"max_tokens": 4, **body})
                assert response.status_code == status, response.text
                assert (rig.client.admission.num_choices, rig.client.admission.num_tokens) == (0, 0), body
            rig.gate.clear()
            held = asyncio.create_task(front_end.post("/v1/completions", {"prompt": "queued", "n": 5}))
            async with asyncio.timeout(10):
                while True:
                    if rig.client.admission.num_choices == 5:
                        break
                    await asyncio.sleep(0)
            held.cancel()
            await asyncio.wait([held])
            assert (rig.client.admission.num_choices, rig.client.admission.num_tokens) == (0, 0)
            rig.gate.set()
        finally:
            await front_end.close()


@pytest.mark.parametrize("kind", ["inproc", "zmq"])
async def test_permits_return_when_the_engine_dies(kind: str) -> None:
    async with open_rig(kind, fail_at_step=3) as rig:
        front_end = make_front_end(client=rig.client)  # type: ignore[arg-type]  # a real one
        try:
            bodies = [{"prompt": "x", "n": 40, "max_tokens": 100, "stream": bool(i % 2)} for i in range(4)]
            replies = await asyncio.gather(*(front_end.post("/v1/completions", body) for body in bodies))
            assert all("engine_dead" in reply.text for reply in replies)
            assert (rig.client.admission.num_choices, rig.client.admission.num_tokens) == (0, 0)
        finally:
            await front_end.close()
