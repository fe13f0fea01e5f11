"""docs/rl.md, fastdeploy.md and experts.md name what exists: operations, arguments, sources, routes, options."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from fastapi.routing import APIRoute

from headrace.cli import experts
from headrace.cli.ctl import add_arguments
from headrace.cli.help import HelpFormatter
from headrace.config.cli import add_options
from headrace.config.options import ServeConfig
from headrace.engine.control.experts import RebalanceArguments
from headrace.engine.control.operations import AUTOMATIC, OPERATIONS
from headrace.server.app import all_routers
from headrace.server.dialects import dialect_routers, eplb
from headrace.server.dialects.collective_rpc import METHODS
from headrace.server.dialects.fastdeploy import legacy
from headrace.server.dialects.fastdeploy import router as fastdeploy
from headrace.server.protocol.control import OPERATIONS as BODIES
from headrace.server.protocol.expert_replies import Experts
from headrace.server.protocol.sources import SOURCES

DOCS = Path(__file__).parents[2] / "docs"
RL, FASTDEPLOY, EXPERTS = DOCS / "rl.md", DOCS / "fastdeploy.md", DOCS / "experts.md"
PAGES = pytest.mark.parametrize("page", [RL, FASTDEPLOY, EXPERTS], ids=lambda page: page.stem)
CODE = re.compile(r"`([^`\n]+)`")
ROUTE = re.compile(r"/[A-Za-z_][\w./{}-]*")
OPTION = re.compile(r"--[a-z][a-z-]+")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATTERNS = ("/v1/control", "/v1/control/OPERATION", "/v1/control/...")  # for many routes at once
FOLDERS = ("/dev/shm", "/tmp/")


def paths(*routers: object) -> set[str]:
    return {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def table(page: Path, heading: str) -> Iterator[list[str]]:
    """Cells of the first table whose first row begins with `heading`, without its head."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def own(page: Path) -> str:
    """The prose that speaks of Headrace: of FastDeploy's page, tables without their first column."""
    text = prose(page)
    if page != FASTDEPLOY:
        return text
    return "\n".join("|".join(line.split("|")[2:]) if line.startswith("|") else line for line in text.splitlines())


def names(cell: str) -> list[str]:
    """What stands in code marks, without remarks in parentheses."""
    return CODE.findall(re.sub(r"\([^()]*\)", "", cell))


def test_every_operation_stands_in_the_table_with_its_arguments() -> None:
    documented = {names(cells[0])[0]: names(cells[1]) for cells in table(RL, "Operation | Arguments (defaults)")}
    existing = {
        name: [field.name for field in msgspec.structs.fields(entry.arguments)]
        for name, entry in OPERATIONS.items()
        if name != AUTOMATIC
    }
    assert {name: sorted(fields) for name, fields in documented.items()} == {
        name: sorted(fields) for name, fields in existing.items()
    }


def test_every_argument_can_be_sent() -> None:
    """The bodies of the HTTP routes have the fields of the table."""
    fields = {name for body in BODIES for name in body.model_fields}
    for cells in table(RL, "Operation | Arguments (defaults)"):
        assert set(names(cells[1])) <= fields, cells[0]


def test_every_source_stands_in_the_table_with_its_fields() -> None:
    documented = {cells[0].strip("`"): set(names(cells[2])) for cells in table(RL, "Source | Body")}
    for kind, model in SOURCES.items():
        assert documented[kind] == set(model.model_fields) - {"kind"}, kind


def test_every_remote_method_is_named() -> None:
    assert set(METHODS) <= set(CODE.findall(RL.read_text(encoding="utf-8")))


@PAGES
def test_named_routes_exist(page: Path) -> None:
    existing = paths(*all_routers())
    named = {route for code in CODE.findall(own(page)) for route in ROUTE.findall(code) if _is_route(code, route)}
    assert named, "the page names routes"
    assert {route for route in named if route not in existing and route not in PATTERNS} == set()


def _is_route(code: str, route: str) -> bool:
    return code.removeprefix("GET ").removeprefix("POST ").startswith(route) and not route.startswith(FOLDERS)


@pytest.mark.parametrize("page", [RL, FASTDEPLOY], ids=lambda page: page.stem)
def test_existing_routes_are_named(page: Path) -> None:
    text = CODE.findall(page.read_text(encoding="utf-8"))
    for path in paths(*dialect_routers()) if page == RL else paths(fastdeploy, legacy, eplb.router):
        assert path in text or path.removesuffix("/") in text, path


@PAGES
def test_named_options_exist(page: Path) -> None:
    serve = argparse.ArgumentParser()
    add_options(serve, ServeConfig)
    of_experts = argparse.ArgumentParser(formatter_class=HelpFormatter)
    experts.add_arguments(of_experts)
    existing = set(serve._option_string_actions) | _options_of() | _options_of(of_experts)
    named = {option for code in CODE.findall(own(page)) for option in OPTION.findall(code)}
    assert named - existing == set()


def test_commands_of_ctl_are_right() -> None:
    """Every line of `headrace ctl` in the pages and in the README parses."""
    for page in (RL, FASTDEPLOY, EXPERTS, DOCS.parent / "README.md"):
        for line in re.findall(r"^headrace ctl (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            _parser().parse_args(line.partition("#")[0].split())


def test_commands_of_experts_are_right() -> None:
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    experts.add_arguments(parser)
    for line in re.findall(r"^headrace experts (.*)$", EXPERTS.read_text(encoding="utf-8"), re.MULTILINE):
        parser.parse_args(line.partition("#")[0].split())


def test_bodies_of_the_eplb_routes_are_right() -> None:
    models = {
        "/rearrange_experts": eplb.RearrangeRequest,
        "/get_per_expert_tokens_stats": eplb.StatsRequest,
        "/check_redundant": eplb.CheckRequest,
    }
    shown = re.findall(r"^curl http://[^/]+(/\S+) -d '(.*)'$", EXPERTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {path for path, _ in shown} == set(models)
    for path, body in shown:
        assert not models[path].model_validate(json.loads(body)).unknown_fields(), path


def test_the_reply_of_experts_has_its_fields() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", EXPERTS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    reply = msgspec.json.decode(block, type=Experts)
    shown = json.loads(block)
    assert set(shown) == set(Experts.__struct_fields__)
    for name in ("run", "last_decision", "window", "balance"):
        assert set(shown[name]) == set(getattr(reply, name).__struct_fields__), name


def test_every_action_and_its_fields_stand_in_the_table() -> None:
    rows = {name: names(cells[2]) for cells in table(EXPERTS, "`action` | Does") for name in names(cells[0])}
    fields = {field.name: field for field in msgspec.structs.fields(RebalanceArguments)}
    assert set(rows) == set(get_args(fields["action"].type))
    assert {name for row in rows.values() for name in row} == set(fields) - {"action"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    add_arguments(parser)
    return parser


def _options_of(parser: argparse.ArgumentParser | None = None) -> set[str]:
    """Those of actions of actions too."""
    parser = parser or _parser()
    inner = [one for action in parser._actions if isinstance(action.choices, dict) for one in action.choices.values()]
    return set(parser._option_string_actions).union(*map(_options_of, inner))
