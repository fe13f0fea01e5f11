"""`headrace run-batch` over fakes: what a line may be, what an output holds, what is sent, retried and written."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headrace.cli import main as cli
from headrace.cli import run_batch_work
from headrace.cli.run_batch import BatchConfig
from headrace.cli.run_batch_lines import BadLine, InputLines, Job, parse_lines, result_of
from headrace.cli.run_batch_output import OutputLines
from headrace.cli.run_batch_work import answer_all
from headrace.config.options import ServeConfig
from headrace.config.schema import options_of
from headrace.errors import ConfigError, StartupError
from headrace.testing.echo_app import echo_app
from headrace.testing.front_end import FrontEnd, make_front_end

BODY = {"prompt": "Hi"}


def request(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": BODY, **changes}


def text(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() + b"\n" for value in values]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# ---------------------------------------------------------------------- lines


def test_a_job_keeps_its_body_byte_for_byte() -> None:
    line = b'\xef\xbb\xbf{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"x":1.0 ,"x":1e400}}'
    (job,) = parse_lines([line])
    assert job == Job(1, "a", "/v1/completions", b'{"x":1.0 ,"x":1e400}')


@pytest.mark.parametrize(
    ("line", "custom_id", "code"),
    [
        (b"no json\n", None, "invalid_json"),
        (b"[1]\n", None, "invalid_json"),
        (b'{"custom_id": "a", \n', None, "invalid_json"),
        (b'{"custom_id": "\xff"}\n', None, "invalid_json"),
        (b"\xff\n", None, "invalid_json"),
        (b'{"body": ' + b"[" * 5000 + b"]" * 5000 + b"}", None, "invalid_json"),
        *((text(line)[0], custom_id, code) for line, custom_id, code in [
            ({}, None, "invalid_custom_id"),
            (request(None), None, "invalid_custom_id"),
            (request(""), None, "invalid_custom_id"),
            (request(7), None, "invalid_custom_id"),
            (request(method="GET"), "a", "invalid_method"),
            ({"custom_id": "a"}, "a", "invalid_method"),
            (request(url="/v1/models"), "a", "invalid_url"),
            (request(url=["/v1/completions"]), "a", "invalid_url"),
            (request(body=None), "a", "invalid_body"),
            (request(body=[BODY]), "a", "invalid_body"),
            ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "a", "invalid_body"),
            (request(body={"stream": True}), "a", "stream_not_supported"),
        ]),
    ],
)  # fmt: skip
def test_a_bad_line_says_why(line: bytes, custom_id: str | None, code: str) -> None:
    blank, good = b" \n", text(request("other"))[0]
    bad, after = parse_lines([blank, line, good])
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.custom_id, bad.code) == (2, custom_id, code)
    assert bad.message.startswith("line 2: ")
    assert isinstance(after, Job)


def test_the_first_line_owns_a_custom_id() -> None:
    lines = text(request("a", method="GET"), request("a"), request("b"), request("a"))
    kinds = [(line.custom_id, getattr(line, "code", "job")) for line in parse_lines(lines)]
    assert kinds == [
        ("a", "invalid_method"),
        (None, "duplicate_custom_id"),
        ("b", "job"),
        (None, "duplicate_custom_id"),
    ]


def test_input_is_a_file_a_gz_file_or_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"".join(text(request("a"), request("b"))) + b"\n"
    (tmp_path / "in.jsonl").write_bytes(content)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    for path in (str(tmp_path / "in.jsonl"), str(tmp_path / "in.jsonl.gz"), "-"):
        lines = InputLines(path)
        assert lines.num_lines == 2
        assert b"".join(lines) == b"".join(lines) == content
    (tmp_path / "cut.gz").write_bytes(gzip.compress(content)[:-9])
    for name in ("cut.gz", "none.jsonl"):
        with pytest.raises(ConfigError, match=name):
            InputLines(str(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "body"),
    [
        (b'{"a": 1.0}', '{"a": 1.0}'),
        (b'{\n  "a": [1.5,\r\n 2]\n}', '{"a":[1.5,2]}'),
        (b"<html>\nno\xff</html>", '"<html>\\nno�</html>"'),
        (b'{"a": NaN}', '"{\\"a\\": NaN}"'),
        (b"", '""'),
    ],
)
def test_any_reply_is_one_line(content: bytes, body: str, tmp_path: Path) -> None:
    with OutputLines(str(tmp_path / "out")) as output:
        output.write(result_of(Job(1, "a", "", b""), 200, "r", content))
    (line,) = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert line.endswith(f'"response":{{"status_code":200,"request_id":"r","body":{body}}},"error":null}}')


# ---------------------------------------------------------------------- work


Handler = Callable[[httpx.Request], Any]


class Run:
    """`answer_all` into a file, against a function that answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: asyncio.Queue[None] = asyncio.Queue()  # an item for each line that is done

    async def __call__(self, lines: list[bytes], handler: Handler, **options: Any) -> None:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch") as http:
            await self.over(http, lines, **options)

    async def over(
        self,
        http: httpx.AsyncClient,
        lines: list[bytes],
        *,
        concurrency: int = 4,
        retries: int = 2,
        drop_failed: bool = False,
    ) -> None:
        with OutputLines(str(self.path), drop_failed=drop_failed) as output:
            await answer_all(
                parse_lines(lines),
                output,
                http,
                concurrency=concurrency,
                retries=retries,
                on_line=lambda: self.seen.put_nowait(None),
            )

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read(self.path)

    @property
    def ids(self) -> list[str | None]:
        return [line["custom_id"] for line in self.lines]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(run_batch_work, "FIRST_RETRY_S", 0.001)
    return Run(tmp_path / "out.jsonl")


def ok(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={}, headers={"X-Request-Id": "r"})


async def test_answers_are_written_in_order_of_completion_and_so_many_run_at_once(run: Run) -> None:
    gates = {name: asyncio.Event() for name in "abcd"}
    started: asyncio.Queue[str] = asyncio.Queue()

    async def handler(request: httpx.Request) -> httpx.Response:
        name = json.loads(request.content)["prompt"]
        started.put_nowait(name)
        await gates[name].wait()
        return ok(request)

    lines = text(*(request(name, body={"prompt": name}) for name in "abcd"))
    task = asyncio.create_task(run(lines, handler, concurrency=2))
    async with asyncio.timeout(20):
        for name, running in (("b", "ab"), ("c", "c"), ("a", "d"), ("d", "")):
            assert "".join([await started.get() for _ in running]) == running
            assert started.empty()
            gates[name].set()
            await run.seen.get()
            assert run.ids[-1] == name
        await task
    assert run.ids == ["b", "c", "a", "d"]
    assert run.lines[0]["response"] == {"status_code": 200, "request_id": "r", "body": {}}


async def test_a_second_run_sends_what_has_no_line_yet(run: Run) -> None:
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["n"])
        return ok(request)

    lines = [*text(*(request(f"r{n}", body={"n": n}) for n in range(6))), b"bad\n"]
    await run([*lines[:3], b"\n", b"\n", b"\n", lines[6]], handler)
    await run(lines, handler)
    assert sorted(sent) == [0, 1, 2, 3, 4, 5]
    assert sorted(map(str, run.ids)) == ["None", *(f"r{n}" for n in range(6))]


async def test_only_what_has_failed_is_sent_again(run: Run) -> None:
    sent: list[int] = []
    statuses = {1: 500, 2: 400}

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["n"])
        return httpx.Response(statuses.get(sent[-1], 200), json={})

    lines = text(*(request(f"r{n}", body={"n": n}) for n in range(4)))
    await run([*lines, b"bad\n"], handler)
    sent.clear()
    statuses.pop(1)
    await run([*lines, *text(request("mended", body={"n": 4}))], handler, drop_failed=True)
    assert sorted(sent) == [1, 2, 4]
    codes = {line["custom_id"]: line["response"]["status_code"] for line in run.lines}
    assert codes == {"r0": 200, "r1": 200, "r2": 400, "r3": 200, "mended": 200}
    assert len(run.lines) == 5


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.Response(503, json={"error": {"message": "starting", "code": "starting"}}, headers={"Retry-After": "0"}),
        httpx.Response(429, json={"error": {"message": "full", "code": "queue_full"}}),
        httpx.Response(502, text="<html>"),
        httpx.ConnectError("refused"),
        httpx.ReadError(""),
    ],
)
async def test_trouble_of_the_server_is_waited_out(trouble: httpx.Response | httpx.TransportError, run: Run) -> None:
    answers: Iterator[Any] = iter([trouble, trouble, ok])

    def handler(request: httpx.Request) -> httpx.Response:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else answer(request)

    await run(text(request()), handler)
    assert run.lines[0]["response"]["status_code"] == 200


async def test_trouble_that_stays_ends_the_run_and_leaves_the_line_open(run: Run) -> None:
    code, num_calls = "", 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal num_calls
        if json.loads(request.content) == BODY:
            return ok(request)
        num_calls += 1
        return httpx.Response(503, json={"error": {"message": "no\nroom", "code": code}})

    lines = text(request("good"), request("open", body={"x": 1}), request("never"))
    for each, expected in (("draining", 3), ("engine_dead", 1)):
        code, num_calls = each, 0
        with pytest.raises(StartupError, match="no\nroom"):
            await run(lines, handler, concurrency=1)
        assert num_calls == expected
    assert run.ids == ["good"]
    await run(lines, ok)
    assert run.ids == ["good", "open", "never"]


@pytest.mark.parametrize(("attempt", "asked", "expected"), [(0, "7", 7), (0, "900", 30), (2, "soon", 4), (99, "", 30)])
def test_pauses_grow_and_are_bounded(attempt: int, asked: str, expected: float) -> None:
    response = httpx.Response(503, headers={"Retry-After": asked})
    assert run_batch_work._pause_s(response, attempt) == expected


# ---------------------------------------------------------------------- the server's own application


@pytest.fixture
async def front_end() -> AsyncIterator[FrontEnd]:
    front_end = make_front_end()
    yield front_end
    await front_end.close()


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "n": 2, "logprobs": 1, "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}),
        ("/v1/completions", {"prompt": "Hi", "temperature": -1}),
        ("/v1/completions", {"prompt": "x" * 1000}),
        ("/v1/chat/completions", {"model": "nobody", "messages": []}),
    ],
)
async def test_a_body_means_what_it_means_over_http(
    url: str, body: dict[str, Any], front_end: FrontEnd, run: Run
) -> None:
    await run.over(front_end.http, text(request(url=url, body=body)))
    reply = await front_end.post(url, body)
    (line,) = run.lines
    assert line["response"]["status_code"] == reply.status_code
    changing = ("id", "created", "headrace", "metrics")
    got, expected = line["response"]["body"], reply.json()
    assert {key: got[key] for key in got if key not in changing} == {
        key: expected[key] for key in expected if key not in changing
    }


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--retries", "-1"], "--retries"),
        (["-i", "/no/such.jsonl"], "/no/such.jsonl"),
        (["-o", "/no/such/folder/out"], "/no/such/folder/out"),
        (["-o", "IN"], "both"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--model", "x"], "--model"),
        (["--url", "http://127.0.0.1:9", "--config", "x"], "--config"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_what_cannot_work_is_one_line(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(text(request())[0])
    words = [word.replace("IN", str(source)) for word in words]
    assert cli.main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: ")
    assert expected in line
    assert source.read_bytes() == text(request())[0]


def test_help_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run-batch", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: headrace run-batch" in shown
    assert all(option in shown for option in ("--output FILE", "--max-num-seqs N", "--reasoning-parser NAME", "--url"))
    assert {option.key for option in options_of(BatchConfig)} <= {option.key for option in options_of(ServeConfig)}


async def test_embeddings(run: Run) -> None:
    lines = text(
        request("one", url="/v1/embeddings", body={"input": ["a", "bc"], "encoding_format": "base64"}),
        request("bad", url="/v1/embeddings", body={"input": []}),
    )
    async with echo_app() as http:
        await run.over(http, lines)
    bodies = {line["custom_id"]: line["response"]["body"] for line in run.lines}
    assert [each["index"] for each in bodies["one"]["data"]] == [0, 1]
    assert bodies["one"]["usage"]["total_tokens"] == 3
    assert bodies["bad"]["error"]["param"] == "input"
