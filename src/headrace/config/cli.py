"""Command-line options made from the config dataclasses: `add_options` to a parser, `given_options` back out of it.

Used by the subcommands that start an engine. Values stay text here; `load.py` converts and checks them, so that a wrong
value reads the same whether it came from the command line or from a YAML file.
"""

from __future__ import annotations

import argparse
from typing import Any

from headrace.config.options import ServeConfig
from headrace.config.schema import Option, options_of
from headrace.errors import ConfigError

KIND_METAVAR = {int: "N", float: "X", str: "TEXT"}


def add_options(parser: argparse.ArgumentParser, root: type = ServeConfig, *, positional: bool = True) -> None:
    """Adds `--config`, the positional MODEL if wanted, and one option per field, grouped by component."""
    if positional:
        help_line = next(option.help for option in options_of(root) if option.key == "model")
        parser.add_argument("model_name", nargs="?", metavar="MODEL", help=help_line)
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line wins over it")
    groups: dict[str, Any] = {}
    for option in options_of(root):
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)


def given_options(namespace: argparse.Namespace, root: type = ServeConfig) -> dict[str, Any]:
    """The options that stood on the command line, by key, not yet converted."""
    given = {
        option.key: getattr(namespace, option.key) for option in options_of(root) if hasattr(namespace, option.key)
    }
    name = getattr(namespace, "model_name", None)
    if name is not None:
        if given.get("model", name) != name:
            raise ConfigError(f"two models given: {name!r} and --model {given['model']!r}")
        given["model"] = name
    return given


def _add(group: Any, option: Option) -> None:
    # A default of SUPPRESS leaves out what was not given, so that YAML can supply it.
    common = {"dest": option.key, "default": argparse.SUPPRESS, "help": _help(option)}
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = option.metavar or ("|".join(option.choices) if option.choices else KIND_METAVAR[option.kind])
    group.add_argument(option.flag, action="append" if option.is_repeatable else "store", metavar=metavar, **common)


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if "default:" in text or option.default in (None, ()):
        return text
    return f"{text} (default: {default_text(option).replace('%', '%%')})"


def default_text(option: Option) -> str:
    """The default as a person would type it."""
    if option.default is None or option.default == ():
        return ""
    if option.kind is bool:
        return "on" if option.default else "off"
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
