"""Reads one streamed completion of a running server in a thread, as a client would. For end-to-end tests."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx


class StreamReader:
    """Starts at once. `has_begun` is set at the first chunk, `has_ended` when nothing more can come."""

    def __init__(self, url: str, *, max_tokens: int, api_key: str = "", prompt: str = "abc") -> None:
        self.status = 0
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False  # [DONE] came
        self.is_cut = False  # the connection broke instead
        self.ended_s = 0.0  # time.monotonic()
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        threading.Thread(target=self._read, args=(f"{url}/v1/completions", body, headers), daemon=True).start()

    def _read(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60.0) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self._take(line)
        except httpx.HTTPError:
            self.is_cut = True
        finally:
            self.ended_s = time.monotonic()
            self.has_begun.set()
            self.has_ended.set()

    def _take(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if not data:
            return
        if data == "[DONE]":
            self.is_done = True
            return
        frame = json.loads(data)
        if "error" in frame:
            self.error = frame["error"]
            return
        for choice in frame["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.has_begun.set()


def begin_streams(url: str, count: int, *, max_tokens: int, api_key: str = "") -> list[StreamReader]:
    """Each of them has had its first chunk when this returns."""
    readers = [StreamReader(url, max_tokens=max_tokens, api_key=api_key) for _ in range(count)]
    for reader in readers:
        assert reader.has_begun.wait(20.0), "a stream did not begin"
        assert not reader.has_ended.is_set(), f"a stream ended at once: {reader.status} {reader.error}"
    return readers
