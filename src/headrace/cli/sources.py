"""Where `chat` and `complete` get their text from: a model in this process, or a server at `--url`.

Both give pieces of text as they come; closing the iteration early stops the generation. Nothing here prints.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec

from headrace.cli.sse import data_lines
from headrace.config.cli import add_options, given_options
from headrace.config.load import load_config
from headrace.config.options import EngineConfig
from headrace.errors import ConfigError, ErrorInfo, FailedRequest, StartupError
from headrace.types import SamplingParams

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, and how many tokens there have been so far, where that is known."""

    text: str
    num_tokens: int | None = None


class TextSource(Protocol):
    """A model that answers. Iterators raise RequestError when the request fails."""

    name: str

    def chat(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> Generator[Piece, None, None]: ...

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Generator[Piece, None, None]: ...

    def close(self) -> None: ...


def add_source_arguments(
    parser: argparse.ArgumentParser, *, temperature: float | None, max_tokens: int | None, positional: bool
) -> None:
    """The options of both commands: how to sample, which server or which model."""
    sampling = parser.add_argument_group("Sampling")
    limit = "what the context leaves" if max_tokens is None else str(max_tokens)
    sampling.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"(default: {limit})")
    heat = "the model's own" if temperature is None else f"{temperature:g}"
    sampling.add_argument(
        "--temperature", type=float, default=temperature, metavar="X", help=f"0: greedy (default: {heat})"
    )
    sampling.add_argument("--top-p", type=float, metavar="X")
    sampling.add_argument("--top-k", type=int, metavar="N")
    sampling.add_argument("--sampling-seed", type=int, metavar="N", help="the same seed gives the same text")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    server = parser.add_argument_group("Server (instead of a model in this process)")
    server.add_argument("--url", metavar="URL", help="base URL of an OpenAI-compatible server")
    server.add_argument("--key", metavar="KEY", help="its API key (or HEADRACE_API_KEY)")
    add_options(parser, EngineConfig, positional=positional)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given, by the name that both OpenAI's API and SamplingParams use."""
    fields = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.sampling_seed,
        "stop": args.stop,
    }
    return {name: value for name, value in fields.items() if value is not None}


def open_source(args: argparse.Namespace) -> TextSource:
    """Connects, or loads the model. Raises StartupError."""
    given = given_options(args, EngineConfig)
    if args.url is None:
        return LocalSource(load_config(EngineConfig, given, args.config))
    for key in given:
        if key != "model":
            raise ConfigError(f"--{key.replace('_', '-')} is an option of the engine; with --url it has no effect")
    return RemoteSource(args.url, args.key or os.environ.get("HEADRACE_API_KEY"), given.get("model"))


class LocalSource:
    """The model in this process."""

    def __init__(self, config: EngineConfig) -> None:
        from headrace.llm import LLM

        self._llm = LLM.from_config(config)
        self.name = self._llm.name

    def chat(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> Generator[Piece, None, None]:
        return self._pieces(self._llm.stream_chat(messages, self._params(sampling)))

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Generator[Piece, None, None]:
        return self._pieces(self._llm.stream(prompt, self._params(sampling)))

    def close(self) -> None:
        self._llm.close()

    def _params(self, sampling: dict[str, Any]) -> SamplingParams:
        given = {**sampling, "stop": tuple(sampling.get("stop", ()))}
        return msgspec.structs.replace(self._llm.default_params, **given)

    def _pieces(self, deltas: Any) -> Generator[Piece, None, None]:
        num_tokens = 0
        with closing(deltas):
            for delta in deltas:
                num_tokens += len(delta.token_ids)
                yield Piece(delta.text, num_tokens)


class RemoteSource:
    """A server that speaks OpenAI's API."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._url = api_base(url)
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout)
        self.name = model or self._first_model()

    def chat(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> Generator[Piece, None, None]:
        return self._pieces("/chat/completions", {"messages": messages, **sampling})

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Generator[Piece, None, None]:
        return self._pieces("/completions", {"prompt": prompt, **sampling})

    def close(self) -> None:
        self._http.close()

    def _first_model(self) -> str:
        try:
            response = self._http.get("/models", timeout=_CONNECT_TIMEOUT_S)
            raise_status(response)
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise StartupError(f"cannot reach {self._url}: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise StartupError(f"{self._url}/models lists no model; is this an OpenAI-compatible server?") from error

    def _pieces(self, path: str, body: dict[str, Any]) -> Generator[Piece, None, None]:
        body = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            with self._http.stream("POST", path, json=body) as response:
                raise_status(response)
                yield from _read_pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise StartupError(f"lost {self._url}: {error}") from error


def api_base(url: str) -> str:
    """The URL below which the OpenAI routes lie: `host:port`, `http://host:port` and `.../v1` all work."""
    url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    return url if url.endswith("/v1") else f"{url}/v1"


def _read_pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for data in data_lines(lines):
        chunk = json.loads(data)
        if "error" in chunk:
            raise _failure(500, chunk["error"])
        for choice in chunk.get("choices", ()):
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            if text:
                yield Piece(text)
        if usage := chunk.get("usage"):
            yield Piece("", usage["completion_tokens"])


def raise_status(response: httpx.Response) -> None:
    """Raises what the server says is wrong, if anything is."""
    if response.is_success:
        return
    response.read()
    try:
        error = response.json()["error"]
    except (ValueError, LookupError, TypeError):
        error = {"message": f"{response.url} answered {response.status_code}: {response.text[:200]}"}
    raise _failure(response.status_code, error)


def _failure(status: int, error: dict[str, Any]) -> FailedRequest:
    message = str(error.get("message", error))
    return FailedRequest(ErrorInfo(status, str(error.get("type")), str(error.get("code")), message, error.get("param")))
