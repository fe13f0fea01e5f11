"""Hugging Face ids against a small hub on this machine: what is fetched, and each refusal as one line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "a" * 40
REPOSITORIES = {
    "owner/model": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "modeling_model.py": b"raise SystemExit('code of a repository must never come here')",
        "pytorch_model.bin": b"a pickle",
        "onnx/model.onnx": b"onnx",
    },
    "owner/only-gguf": {"m-Q8_0.gguf": b"GGUF 8", "m-Q4_K_M.gguf": b"GGUF 4", "README.md": b"read me"},
    "owner/gated": {"config.json": b"{}", "model.safetensors": b"weights"},
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download needs."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._send(404, b"", {})

    def _api(self, repo: str, rest: list[str]) -> None:
        if repo not in REPOSITORIES:
            self._send(401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self._send(404, b'{"error": "no such revision"}', {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in REPOSITORIES[repo].items()
            ]
            self._send(200, json.dumps(files).encode(), {})
        else:
            siblings = [{"rfilename": name} for name in REPOSITORIES[repo]]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self._send(200, json.dumps(info).encode(), {})

    def _file(self, repo: str, name: str) -> None:
        data = REPOSITORIES.get(repo, {}).get(name)
        if repo == "owner/gated":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            etag = hashlib.sha1(data).hexdigest()
            self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def hub_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def pull(name: str, *words: str, hub_url: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "headrace", "pull", "--quiet", name, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment)


def test_a_folder_of_safetensors_comes_without_code_and_pickles(hub_url: str, tmp_path: Path) -> None:
    done = pull("owner/model", hub_url=hub_url, home=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    gone = pull("owner/model", hub_url="http://127.0.0.1:9", home=tmp_path)  # offline: what is there serves
    assert gone.stdout == done.stdout, gone.stderr


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("owner/only-gguf", b"GGUF 4"),
        ("owner/only-gguf:Q8_0", b"GGUF 8"),
        ("owner/only-gguf:m-Q8_0.gguf", b"GGUF 8"),
    ],
)
def test_a_gguf_file(name: str, data: bytes, hub_url: str, tmp_path: Path) -> None:
    done = pull(name, hub_url=hub_url, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == data


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["owner/nobody"], "no public model 'owner/nobody'"),
        (["owner/model", "--revision", "v9"], "no such revision"),
        (["owner/model:missing.gguf"], "no such file"),
        (["owner/only-gguf:Q5_1"], "m-Q4_K_M.gguf, m-Q8_0.gguf"),
        (["owner/gated"], "is gated"),
    ],
)
def test_each_refusal_is_one_line(words: list[str], expected: str, hub_url: str, tmp_path: Path) -> None:
    done = pull(*words, hub_url=hub_url, home=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("headrace: ")
    assert expected in done.stderr
    assert done.stdout == ""
