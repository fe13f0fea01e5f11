"""`headrace ctl`: control operations of a running server: pause, drain, sleep, new weights, and what it is at.

Exit codes: 0 the operation succeeded, 1 it failed or was refused, 2 wrong usage. With `--json` the server's reply is
printed as it came, whatever it says.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.cli.control_client import ControlClient, Json
from headrace.cli.ctl_experts import add_experts
from headrace.cli.ctl_output import (
    Bar,
    error_text,
    list_lines,
    operation_lines,
    print_reply,
    progress_bar,
    status_lines,
)
from headrace.cli.help import HelpFormatter
from headrace.errors import HeadraceError, StartupError

MODES = ("abort", "wait", "keep")
SAFETENSORS = ".safetensors"

Subparsers = Any  # argparse does not name its type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    _add_pause_and_sleep(actions)
    _add_refresh(actions)
    abort = _add(actions, "abort", _abort, "end requests")
    abort.add_argument("ids", nargs="*", metavar="ID", help="a request's id, as its reply or its client named it")
    abort.add_argument("--all", action="store_true", help="every request")
    _add(actions, "status", _status, "what the server is at")
    checksum = _add(actions, "checksum", _checksum, "checksums of the weights")
    checksum.add_argument("names", nargs="*", metavar="TENSOR", help="(default: all)")
    checksum.add_argument("--tensors", action="store_true", help="a line per tensor, not the total alone")
    operations = _add(actions, "operations", _operations, "the last operations")
    operations.add_argument("id", nargs="?", metavar="ID", help="that one alone")
    cancel = _add(actions, "cancel", _cancel, "end a running operation")
    cancel.add_argument("id", nargs="?", metavar="ID", help="(default: the one that runs)")
    add_experts(actions, _add)


def run(args: argparse.Namespace) -> int:
    key = args.key or os.environ.get("HEADRACE_ADMIN_KEY")
    with ControlClient(args.url, key) as client:
        return int(args.run_action(client, args))


def _add(actions: Subparsers, name: str, action: Any, help_line: str) -> argparse.ArgumentParser:
    description = f"{help_line[0].upper()}{help_line[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=help_line, description=description, formatter_class=HelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    parser.add_argument("--key", "--api-key", metavar="KEY", help="admin key (or HEADRACE_ADMIN_KEY)")
    parser.add_argument("--json", action="store_true", help="print the server's reply as JSON")
    parser.set_defaults(run_action=action, usage_error=parser.error)
    return parser


def _add_pause_and_sleep(actions: Subparsers) -> None:
    pause = _add(actions, "pause", _simple, "stop generating; new requests wait")
    pause.add_argument("--clear-cache", action="store_true", default=None, help="forget cached prefixes too")
    _add(actions, "resume", _simple, "end a pause")
    drain = _add(actions, "drain", _simple, "refuse new requests and wait for those that are there")
    drain.add_argument("--timeout", type=float, dest="timeout_s", metavar="X", help="seconds (default: 600)")
    _add(actions, "undrain", _simple, "take requests again")
    sleep = _add(actions, "sleep", _simple, "give back the memory of weights and KV")
    wake = _add(actions, "wake", _simple, "take it again")
    for parser in (pause, sleep):
        parser.add_argument("--mode", choices=MODES, help="what becomes of running requests (default: abort)")
        parser.add_argument("--timeout", type=float, dest="timeout_s", metavar="X", help="seconds for mode wait")
    for parser in (sleep, wake):
        parser.add_argument("--tags", nargs="+", choices=("weights", "kv_cache"), help="(default: both)")


def _add_refresh(actions: Subparsers) -> None:
    refresh = _add(actions, "refresh", _refresh, "new weights, without a restart")
    refresh.add_argument("path", metavar="PATH", help="a folder, a GGUF file or a .safetensors file, on the server")
    refresh.add_argument("--upload", action="store_true", help="PATH is on this machine: send its safetensors")
    refresh.add_argument("--version", metavar="V", help="the new weights' name (default: a counter)")
    refresh.add_argument("--mode", choices=MODES, help="what becomes of running requests (default: keep)")
    refresh.add_argument("--kv", choices=("recompute", "keep"), help="their KV (default: recompute)")
    refresh.add_argument("--staged", choices=("auto", "always", "never"), help="build beside the old (default: auto)")
    refresh.add_argument("--delta", action="store_true", default=None, help="some tensors only; the others stay")
    refresh.add_argument("--timeout", type=float, dest="timeout_s", metavar="X", help="seconds for all of it")


def _simple(client: ControlClient, args: argparse.Namespace) -> int:
    """An operation whose options are the body's fields."""
    body = _given(args, "mode", "clear_cache", "timeout_s", "tags")
    with progress_bar(args.action) as bar:
        operation = client.run(args.action, body, bar.show_status)
    return _report(args, operation)


def _checksum(client: ControlClient, args: argparse.Namespace) -> int:
    with progress_bar("checksum") as bar:
        operation = client.run("checksum", {"names": args.names} if args.names else {}, bar.show_status)
    if not (args.json or args.names or args.tensors):
        for rank in operation.get("result") or ():
            rank.pop("tensors", None)
    return _report(args, operation)


def _abort(client: ControlClient, args: argparse.Namespace) -> int:
    if bool(args.ids) == args.all:
        args.usage_error("give request ids, or --all")
    return _report(args, client.post("/abort", {"all": True} if args.all else {"request_ids": args.ids}))


def _status(client: ControlClient, args: argparse.Namespace) -> int:
    status = client.get("/status")
    print_reply(args, status, status_lines(status))
    return 0


def _operations(client: ControlClient, args: argparse.Namespace) -> int:
    if args.id is None:
        reply = client.get("/operations")
        print_reply(args, reply, list_lines(reply["operations"]))
    else:
        reply = client.get(f"/operations/{_quoted(args.id)}")
        print_reply(args, reply, list_lines([reply]))
    return 0


def _cancel(client: ControlClient, args: argparse.Namespace) -> int:
    name = args.id
    if name is None:
        running = client.get("/status")["operation"]
        if running is None:
            raise StartupError("no operation is running")
        name = running["id"]
    operation = client.post(f"/operations/{_quoted(name)}/cancel", {})  # as it is now, ended in any case
    print_reply(args, operation, operation_lines(operation))
    return 0


def _refresh(client: ControlClient, args: argparse.Namespace) -> int:
    path = Path(args.path)
    if not args.upload:
        where = os.path.abspath(args.path)  # the server has another working directory
        is_file = path.suffix == SAFETENSORS
        source = (
            {"kind": "file", "file": where, "format": "safetensors"} if is_file else {"kind": "path", "path": where}
        )
        body = {"source": source, **_given(args, "version", "mode", "kv", "staged", "delta", "timeout_s")}
        with progress_bar("refresh") as bar:
            return _report(args, client.run("refresh_weights", body, bar.show_status))
    files = sorted(path.glob(f"*{SAFETENSORS}")) if path.is_dir() else [path]
    if not files or not all(file.suffix == SAFETENSORS and file.is_file() for file in files):
        args.usage_error(f"--upload: {args.path} is neither a {SAFETENSORS} file nor a folder of them")
    with progress_bar("refresh") as bar:
        operation = (
            _upload_file(client, args, files[0], bar) if len(files) == 1 else _upload_all(client, args, files, bar)
        )
    return _report(args, operation)


def _upload_file(client: ControlClient, args: argparse.Namespace, file: Path, bar: Bar) -> Json:
    given = _given(args, "version", "mode", "kv", "staged", "delta", "timeout_s")
    query = {name: str(value).lower() if value is True else str(value) for name, value in given.items()}
    bar.begin_upload(file.name, file.stat().st_size)
    return client.upload("refresh_weights", file, query, bar.add_bytes, bar.show_status)


def _upload_all(client: ControlClient, args: argparse.Namespace, files: list[Path], bar: Bar) -> Json:
    """A checkpoint of several files: one refresh that all of them belong to. It is given up if one of them fails."""
    operation = client.run("begin_refresh", _given(args, "staged", "delta", "mode"), bar.show_status)
    if operation["state"] != "succeeded":
        return operation
    try:
        for file in files:
            bar.begin_upload(file.name, file.stat().st_size)
            _need(client.upload("apply_refresh", file, {}, bar.add_bytes, bar.show_status), file.name)
        return _need(client.run("commit_refresh", _given(args, "version", "mode", "kv"), bar.show_status), args.path)
    except BaseException:
        with suppress(HeadraceError):
            client.post("/abort_refresh", {})
        raise


def _need(operation: Json, what: str) -> Json:
    if operation["state"] != "succeeded":
        raise StartupError(f"{what}: {operation['kind']} {operation['state']}: {error_text(operation)}")
    return operation


def _given(args: argparse.Namespace, *names: str) -> Json:
    """The options that were given, as fields of a body."""
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _report(args: argparse.Namespace, operation: Json) -> int:
    if operation["state"] == "succeeded" or args.json:
        print_reply(args, operation, operation_lines(operation))
        return 0 if operation["state"] == "succeeded" else 1
    raise StartupError(f"{operation['kind']} {operation['state']}: {error_text(operation)}")


def _quoted(name: str) -> str:
    return quote(name, safe="")
