"""`headrace experts`: the simulation's table and JSON, pictures from files and from a server, and what is refused."""

from __future__ import annotations

import json
import struct
import threading
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli import main as cli
from headrace.cli.experts import numbers_of
from headrace.cli.experts_heatmap import (
    EXPERT_SPAN,
    GAP,
    NOTHING,
    ROW,
    Picture,
    colours_of,
    draw_html,
    draw_png,
    picture_of_reply,
)
from headrace.cli.experts_png import encode_png
from headrace.eplb.layout import ExpertMap, initial_map
from headrace.errors import ConfigError, StartupError

ZIPF = ["--experts", "16", "--layers", "2", "--steps", "8", "--tokens", "500", "--top-k", "2", "--ranks", "2,4"]
LOADS = np.arange(2 * 3 * 4).reshape(2, 3, 4)
REPLY: dict[str, Any] = {
    "num_layers": 2,
    "layers": [3, 5],
    "num_experts": 4,
    "num_slots": 6,
    "num_ranks": 2,
    "slots": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]],
    "tokens": [[40, 10, 0, 10], [5, 5, 5, 5]],
    "window": {"start": 1.0, "end": 2.0, "steps": 7, "tokens": 60},
    "balance": {"mean": 0.9, "worst": 0.8, "per_layer": [0.8, 1.0]},
    "run": {"state": "idle"},
    "last_decision": {"action": "skip", "reason": "<balanced>"},
}


class ExpertsHandler(BaseHTTPRequestHandler):
    """GET /v1/experts alone, with a key."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer sesame"
        status, body = (200, REPLY) if allowed else (401, {"error": {"message": "no key", "type": "x", "code": "x"}})
        if self.path != "/v1/experts":
            status, body = 404, {"error": {"message": self.path, "type": "x", "code": "x"}}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), ExpertsHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def loads(tmp_path: Path) -> str:
    file = tmp_path / "loads.npz"
    np.savez(file, loads=LOADS, other=np.zeros(3))
    return str(file)


def reply_picture(**changes: Any) -> Picture:
    return picture_of_reply(json.dumps({**REPLY, **changes}).encode(), "http://x/v1/experts")


def decode_png(data: bytes) -> np.ndarray:
    """Pixels [height, width, 3] of a PNG without filters; checks signature and checksums."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, rest = {}, data[8:]
    while rest:
        size, kind = struct.unpack(">I4s", rest[:8])
        body, (checksum,) = rest[8 : 8 + size], struct.unpack(">I", rest[8 + size : 12 + size])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind], rest = body, rest[12 + size :]
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *kind_of_pixels = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind_of_pixels == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_simulate_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["experts", "simulate", *ZIPF, "--redundant", "0,2,...,6"]) == 0
    out = capsys.readouterr().out
    assert "2 layers of 16 experts; loads: zipf, 8 steps. Policy hierarchical, nodes: 1, slack 0.02." in out
    assert "Planned on 2 steps, judged on the next 2." in out
    rows = [line.split()[:3] for line in out.splitlines() if line.strip().endswith(" ms")]
    assert rows == [
        ["2", "0", "8"],
        ["2", "2", "9"],
        ["2", "4", "10"],
        ["2", "6", "11"],
        ["4", "0", "4"],
        ["4", "4", "5"],
    ]
    assert "left out: num_redundant_experts is 2: 16 experts" in out
    assert "8 ranks, 16 slots, hierarchical   0.828 (0.828)   0.805 (0.805)" in out


def test_simulate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experts", "simulate", *ZIPF, "--redundant", "4", "--nodes", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["num_ranks"] for row in report["rows"]] == [2, 4]
    assert all(0 < row["worst"] <= row["mean"] <= 1 for row in report["rows"])
    assert (report["window"], report["nodes"], report["left_out"]) == (2, 2, [])
    assert report["published_example"][0]["published"] == [0.783, 0.56]


def test_simulate_on_recorded_loads(loads: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "experts",
        "simulate",
        "--loads",
        loads,
        "--ranks",
        "2",
        "--redundant",
        "0",
        "--policy",
        "global",
        "--json",
    ]
    assert cli.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["layers"], report["experts"], report["window"]) == (2, 3, 4, 1)
    # Judged on the second step, where ranks carry 12 + 13 and 14 + 15, and so on.
    plain = [27 / 29, 35 / 37, 43 / 45]
    assert report["rows"][0]["plain_mean"] == pytest.approx(np.mean(plain))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ranks", "64", "--redundant", "8"], "num_redundant_experts is 8"),
        (["--ranks", "x"], "--ranks is 'x'"),
        (["--redundant", "0,8,...,2"], "--redundant is '0,8,...,2'"),
        (["--ranks", "0"], "num_ranks is 0"),
        (["--nodes", "0"], "num_nodes is 0"),
        (["--drift", "2"], "drift is 2.0"),
        (["--slack", "-1"], "--slack is -1.0"),
        (["--steps", "1"], "window is 1 steps"),
        (["--loads", "/no/such.npz"], "/no/such.npz: No such file"),
        (["--loads", __file__], "is no .npz or .npy file of numbers"),
    ],
)
def test_simulations_that_cannot_be(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experts", "simulate", "--experts", "16", "--layers", "1", "--steps", "8", *words]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"a": LOADS, "b": LOADS}, "holds the arrays ['a', 'b']"),
        ({"a": LOADS * 1.0}, "holds float64 of the shape [2, 3, 4]"),
        ({"a": LOADS[0]}, "holds int64 of the shape [3, 4]"),
        ({"a": LOADS - 1}, "holds -1; tokens are counted from 0"),
        ({"a": np.array([None])}, "is no .npz or .npy file of numbers"),
    ],
)
def test_files_that_are_no_loads(
    arrays: dict[str, Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    assert cli.main(["experts", "simulate", "--loads", str(tmp_path / "x.npz")]) == 1
    assert expected in capsys.readouterr().err


def test_a_truncated_file_is_explained(loads: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(loads).read_bytes()
    for size in (0, 10, len(data) // 2):
        Path(loads).write_bytes(data[:size])
        assert cli.main(["experts", "simulate", "--loads", loads]) == 1
        assert "is no .npz or .npy file of numbers" in capsys.readouterr().err


def test_numbers() -> None:
    assert numbers_of("--x", "1,8") == [1, 8]
    assert numbers_of("--x", "1,4,6,...,11") == [1, 4, 6, 8, 10]
    for wrong in ("", "a", "1,2,", "1,...,3", "2,1,...,0", "3,3,...,9", "0,1,...,9999999999", "0,1,...", "1;2"):
        with pytest.raises(ConfigError, match="it must be numbers such as"):
            numbers_of("--x", wrong)


def test_a_page_of_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.html"
    assert cli.main(["experts", "heatmap", "--url", url, "--key", "sesame", "-o", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: balance 0.829, worst layer 0.800\n"
    assert "7 steps, 60 tokens; last decision: skip (&lt;balanced&gt;)" in file.read_text()


def test_a_server_that_refuses(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experts", "heatmap", "--url", url, "-o", str(tmp_path / "out.html")]) == 1
    assert "no key" in capsys.readouterr().err
    assert cli.main(["experts", "heatmap", "--url", url, "--ranks", "2", "-o", str(tmp_path / "out.html")]) == 1
    assert "--ranks is for --loads" in capsys.readouterr().err


def test_a_page_has_a_cell_with_its_numbers_for_each_expert_and_rank() -> None:
    page = draw_html(reply_picture())
    titles = [title.split("</title>")[0] for title in page.split("<title>")[2:]]
    assert len(titles) == 2 * 4 + 2 * 2
    assert "layer 3, expert 0: 40 tokens, 2.67 x even, on rank 0, 1" in titles
    assert "layer 5, expert 1: 5 tokens, 1.00 x even, on rank 0" in titles
    # Half of 40, half of 10, nothing; on the other rank both other halves, and 10.
    assert "layer 3, rank 0: 25 tokens, 0.83 x even, experts 0, 1, 2" in titles
    assert "layer 3, rank 1: 35 tokens, 1.17 x even, experts 3, 0, 1" in titles
    assert "<script" not in page
    assert "src=" not in page
    for panel in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + panel.split("</svg>")[0] + "</svg>")
    assert ">0.857</text>" in page  # balance of layer 3: 30 / 35


def test_colours_tell_more_from_less_and_from_nothing() -> None:
    colours, ratio = colours_of(np.array([[0.0, 1.0, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0]]), EXPERT_SPAN)
    assert ratio.tolist() == [[0, 0.5, 1, 2.5], [0, 0, 0, 0]]
    red, blue = colours[0, :, 0].astype(int), colours[0, :, 2].astype(int)
    assert colours[0, 0].tolist() == NOTHING.tolist() == colours[1, 2].tolist()
    assert blue[1] > red[1]
    assert colours[0, 2].tolist() == [247, 247, 247]
    assert red[3] > blue[3]


def test_a_png_has_the_same_panels() -> None:
    picture = reply_picture()
    pixels = decode_png(draw_png(picture))
    colours, _ = colours_of(picture.tokens_LE.astype(float), EXPERT_SPAN)
    assert pixels.shape[0] == 4 * ROW + GAP
    assert pixels[0, 0].tolist() == colours[0, 0].tolist()
    assert pixels[0, 3 * 24].tolist() == colours[0, 3].tolist()
    assert pixels[ROW, 0].tolist() == [247, 247, 247]  # all even
    assert (pixels[2 * ROW : 2 * ROW + GAP] == 255).all()


def test_png_of_any_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(decode_png(encode_png(pixels)), pixels)


def test_pictures_of_a_file(loads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, png, expert_map = tmp_path / "a.html", tmp_path / "a.png", tmp_path / "map.json"
    assert cli.main(["experts", "heatmap", "--loads", loads, "--ranks", "2", "-o", str(page)]) == 0
    assert "loads.npz: 2 steps" in page.read_text()
    assert "4 experts in 4 slots on 2 ranks" in page.read_text()
    expert_map.write_bytes(ExpertMap(np.tile([3, 2, 1, 0], (3, 1)), 4, 4).to_json())
    assert cli.main(["experts", "heatmap", "--loads", loads, "--map", str(expert_map), "-o", str(png)]) == 0
    assert decode_png(png.read_bytes()).shape[0] == 6 * ROW + GAP
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "x.jpg"], "--output is x.jpg; it must end in .html or .png"),
        (["-o", "/no/such/x.png", "--ranks", "2"], "cannot write /no/such/x.png"),
        (["-o", "x.png", "--ranks", "3"], "num_redundant_experts is 0"),
        (["-o", "x.png", "--ranks", "0"], "num_ranks is 0"),
        (["-o", "x.png", "--map", "/no/such.json"], "cannot read --map /no/such.json"),
        (["-o", "x.png", "--map", __file__], "no expert map"),
        (["-o", "x.png", "--map", "x", "--ranks", "2"], "--map says"),
    ],
)
def test_pictures_that_cannot_be(
    words: list[str], expected: str, loads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["experts", "heatmap", "--loads", loads, *words]) == 1
    assert expected in capsys.readouterr().err


def test_a_map_of_other_layers_is_refused(loads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "map.json").write_bytes(initial_map(1, 4, 0, 2).to_json())
    words = ["--map", str(tmp_path / "map.json"), "-o", str(tmp_path / "x.png")]
    assert cli.main(["experts", "heatmap", "--loads", loads, *words]) == 1
    assert "the map's layers x experts are [1, 4]" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [[1, 2, 3, 4]]},
        {"tokens": [[1, 2, 3, -4], [1, 1, 1, 1]]},
        {"tokens": [[1], [1, 2]]},
        {"slots": [[0, 1, 2, 3, 0, 9]] * 2},
        {"layers": [3]},
        {"window": None},
        {"num_ranks": 4},
    ],
)
def test_replies_of_something_else(changes: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="answered something else than loads of experts"):
        reply_picture(**changes)


@pytest.mark.parametrize("words", [[], ["simulate"], ["heatmap"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["experts", *words, "--help"])
    assert caught.value.code == 0
    assert "usage: headrace experts" in capsys.readouterr().out
