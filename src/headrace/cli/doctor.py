"""`headrace doctor`: what this machine has, and what Headrace would use of it. Starts no engine and changes nothing.

The report is plain data, made by small functions; the table and `--json` show the same.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import headrace
from headrace.config.options import CacheConfig, SchedulerConfig, ServerConfig
from headrace.config.size import format_size
from headrace.engine.sizing import available_memory, num_kv_blocks
from headrace.errors import HeadraceError
from headrace.executor.base import ModelInfo
from headrace.kernels import create_backend, describe, has_native
from headrace.weights.aliases import ALIASES
from headrace.weights.hub import cache_dir, cached_alias_path

CPU_FEATURES = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni", "avx512_bf16",
    "amx_tile", "amx_int8", "amx_bf16", "neon", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip
PACKAGES = (
    "numpy", "msgspec", "pyzmq", "tokenizers", "fastapi", "uvicorn", "uvloop", "httptools",
    "pydantic", "huggingface_hub", "torch",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--port", type=int, default=ServerConfig().port, metavar="N", help="port to look at (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    report = {
        "headrace": _versions(),
        "cpu": _cpu(),
        "memory": _memory(),
        "kernels": _kernels(),
        "default model": _default_model(),
        "models": _models(),
        "network": {f"port {args.port}": _port_state(args.port)},
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0


def _versions() -> dict[str, Any]:
    found = {"version": headrace.__version__, "python": f"{platform.python_version()} ({sys.executable})"}
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed" + (" (not needed on a CPU)" if name == "torch" else "")
    return {**found, "packages": packages}


def _cpu() -> dict[str, Any]:
    fields = dict(_cpuinfo())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [feature for feature in CPU_FEATURES if feature in flags]
    return {
        "model": fields.get("model name") or platform.processor() or "unknown",
        "physical cores": psutil.cpu_count(logical=False),
        "usable threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cgroup limit": _cgroup_cpus(),
        "features": features,
    }


def _cpuinfo() -> Iterator[tuple[str, str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _cgroup_cpus() -> str:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return "none"
    return "none" if quota == "max" else f"{int(quota) / int(period):g} CPUs"


def _memory() -> dict[str, str]:
    limit = "none"
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        limit = "none" if text == "max" else format_size(int(text))
    except (OSError, ValueError):
        pass  # no control group, or an older kind
    return {
        "total": format_size(psutil.virtual_memory().total),
        "cgroup limit": limit,
        "available to Headrace": format_size(available_memory()),
    }


def _kernels() -> dict[str, str]:
    if has_native():
        why = "compiled; the instructions are chosen for this CPU at run time"
    else:
        why = "numpy; the compiled kernels were not built: that needs a C++ compiler when Headrace is installed"
    compiler = next((path for command in ("c++", "g++", "clang++") if (path := shutil.which(command))), None)
    return {
        "backend auto": f"{describe(create_backend('auto').name)}: {why}",
        "same bits in any batch": "yes" if has_native() else "only with --backend reference-exact",
        "C++ compiler": compiler or "none",
    }


def _default_model() -> dict[str, str]:
    name = "smollm2"
    path = cached_alias_path(name)
    if path is None:
        return {"model": name, "state": f"not in the cache; `headrace pull {name}` fetches it"}
    try:
        return {"model": name, "state": "in the cache", **_kv_memory(name, path)}
    except HeadraceError as error:
        return {"model": name, "state": str(error)}


def _kv_memory(name: str, path: Path) -> dict[str, str]:
    """What the engine would decide, from the file's metadata alone."""
    from headrace.kernels.ops import KVSpec
    from headrace.models.registry import find_family
    from headrace.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    config = find_family(checkpoint).make_config(checkpoint)
    backend = create_backend("auto")
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim)
    per_token = backend.kv_bytes_per_token(spec)
    info = ModelInfo(name, config.vocab_size, config.max_positions, config.eos_token_ids, backend.name, per_token)
    cache, max_num_seqs = CacheConfig(), SchedulerConfig().max_num_seqs
    num_blocks = num_kv_blocks(cache, info, config.max_positions, max_num_seqs, available_memory())
    num_tokens = num_blocks * cache.block_size
    return {
        "context": f"{config.max_positions} tokens",
        "KV per token": format_size(per_token),
        "KV memory": f"{format_size(num_tokens * per_token)} ({cache.kv_cache_fraction:.0%} of what is free at most)",
        "KV tokens": f"{num_tokens} in {num_blocks} blocks",
    }


def _models() -> dict[str, Any]:
    found: dict[str, Any] = {"cache": str(cache_dir())}
    for name, alias in ALIASES.items():
        path = cached_alias_path(name)
        found[name] = f"{path.name}, {path.stat().st_size / 1e6:.0f} MB" if path else f"not pulled ({alias.licence})"
    return found


def _port_state(port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ServerConfig().host, port))
        except (OSError, OverflowError) as error:
            return f"not free: {getattr(error, 'strerror', None) or error}"
    return "free"


def _print(report: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for section, values in report.items():
        table.add_row(f"[bold]{section}[/bold]", "")
        for key, value in values.items():
            table.add_row(f"  {key}", _cell(value), style=None)
    Console(highlight=False).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, list):
        return " ".join(value) or "none known"
    return str(value)
