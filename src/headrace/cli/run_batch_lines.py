"""The two kinds of lines of `headrace run-batch`, in OpenAI's batch format: requests to read, results to write.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    out  {"id": "batch_req_...", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}

A line that cannot become a request is answered by `error` {code, message, line} in place of `response`. A body is
passed on byte for byte, in both directions, so that it means what it means over HTTP. Nothing here writes a file.
"""

from __future__ import annotations

import gzip
import sys
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import ConfigError
from headrace.processing.checks import shown

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
ID_PREFIX: Final = "batch_req_"
BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Job:
    """A line that can be sent."""

    number: int  # of the line, from 1
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot. Its custom_id is None where it has none of its own."""

    number: int
    custom_id: str | None
    code: str
    message: str


class InputLines:
    """The lines of a file, a .gz file, or stdin (`-`), as often as they are asked for. Raises ConfigError.

    What is no file is read to its end at once; a file is not kept in memory.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: list[bytes] | None = None
        if path == "-":
            self._kept = sys.stdin.buffer.readlines()
        elif not Path(path).is_file():
            self._kept = list(self._read())
        self.num_lines = sum(1 for line in self if not line.isspace())

    def __iter__(self) -> Iterator[bytes]:
        return self._read() if self._kept is None else iter(self._kept)

    def _read(self) -> Iterator[bytes]:
        try:
            with gzip.open(self._path) if self._path.endswith(".gz") else open(self._path, "rb") as file:
                yield from file
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"cannot read {self._path}: {getattr(error, 'strerror', None) or error}") from error


def parse_lines(lines: Iterable[bytes]) -> Iterator[Job | BadLine]:
    """Every line but the blank ones. The first line with a custom_id owns it."""
    owners: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        parsed = parse_line(number, line.removeprefix(BOM) if number == 1 else line)
        if parsed.custom_id is not None:
            owner = owners.setdefault(parsed.custom_id, number)
            if owner != number:
                text = f"line {number}: the custom_id {shown(parsed.custom_id)} belongs to line {owner} already"
                parsed = BadLine(number, None, "duplicate_custom_id", text)
        yield parsed


class _Line(msgspec.Struct):
    custom_id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    stream: Any = False


def parse_line(number: int, text: bytes) -> Job | BadLine:
    """One line on its own."""

    def bad(code: str, message: str) -> BadLine:
        return BadLine(number, custom_id, code, f"line {number}: {message}")

    custom_id: str | None = None
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return bad("invalid_json", f"no JSON object: {error}")
    if not isinstance(line.custom_id, str) or not line.custom_id:
        return bad("invalid_custom_id", f"custom_id {_problem(line.custom_id, 'a text')}")
    custom_id = line.custom_id
    if line.method != "POST":
        return bad("invalid_method", f"method {_problem(line.method, 'POST')}")
    if line.url not in URLS:
        return bad("invalid_url", f"url {_problem(line.url, 'one of ' + ', '.join(URLS))}")
    body = bytes(line.body)
    try:
        is_stream = bool(msgspec.json.decode(body, type=_Body).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return bad("invalid_body", f"body is no JSON object: {error}" if body else "body is missing")
    if is_stream:
        return bad("stream_not_supported", "a batch has no streams: leave out stream")
    return Job(number, custom_id, line.url, body)


def _problem(value: Any, wanted: str) -> str:
    return f"is missing; it must be {wanted}" if value is msgspec.UNSET else f"is {shown(value)}, not {wanted}"


class Response(msgspec.Struct, frozen=True):
    """What the server said to a job."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """Why a line was never sent."""

    code: str
    message: str
    line: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output. Its id comes first: that is how the start of a torn line is known as ours."""

    id: str
    custom_id: str | None
    response: Response | None = None
    error: LineError | None = None

    @property
    def is_failure(self) -> bool:
        return self.response is None or not 200 <= self.response.status_code < 300


def refusal(line: BadLine) -> Result:
    error = LineError(line.code, line.message, line.number)
    return Result(id=_new_id(), custom_id=line.custom_id, error=error)


def result_of(job: Job, status: int, request_id: str, content: bytes) -> Result:
    """`content`: the body of the reply; what is no JSON becomes a JSON text."""
    try:
        value = msgspec.json.decode(content)
        body = msgspec.json.encode(value) if b"\n" in content or b"\r" in content else content
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = msgspec.json.encode(content.decode("utf-8", "replace"))
    response = Response(status, request_id, msgspec.Raw(body))
    return Result(id=_new_id(), custom_id=job.custom_id, response=response)


def _new_id() -> str:
    return ID_PREFIX + uuid.uuid4().hex
