"""The server as a trainer sees it: samples with their log probabilities, scores of given tokens, control operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion; `logprobs` are those of the weights that chose the tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt, which are measured against each other."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]


class Server:
    """One server by its URL. Every call raises `httpx.HTTPStatusError` with the server's own words if it fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def sample(
        self, prompts: Sequence[Sequence[int]], *, n: int, num_tokens: int, seed: int
    ) -> tuple[list[Group], str | None]:
        """`n` completions of exactly `num_tokens` each at temperature 1, and the version of the weights."""
        body = {
            "prompt": [list(prompt) for prompt in prompts],
            "n": n,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        reply = self.post("/v1/completions", json=body)
        samples = [
            Sample(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
            for choice in reply["choices"]
        ]
        groups = [Group(tuple(prompt), tuple(samples[i * n : (i + 1) * n])) for i, prompt in enumerate(prompts)]
        return groups, reply["weight_version"]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log probability of every token but the first."""
        body = {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}
        rows = self.post("/v1/completions", json=body)["choices"][0]["prompt_logprobs"][1:]
        return [row[str(token_id)]["logprob"] for row, token_id in zip(rows, token_ids[1:], strict=True)]

    def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Runs an operation to its end and returns what the first rank found."""
        return self.control_with(operation, json=arguments)

    def control_with(self, operation: str, **request: Any) -> dict[str, Any]:
        """The same with any body, as httpx takes it."""
        result: dict[str, Any] = self.post(f"/v1/control/{operation}", **request)["result"][0]
        return result

    def get(self, path: str) -> Any:
        return _read(self._http.get(path))

    def post(self, path: str, **request: Any) -> Any:
        return _read(self._http.post(path, **request))


def _read(response: httpx.Response) -> Any:
    if response.is_error:
        message = f"{response.url.path}: {response.status_code} {response.text}"
        raise httpx.HTTPStatusError(message, request=response.request, response=response)
    return response.json()
