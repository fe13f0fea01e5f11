"""How an option is declared: a dataclass field that carries its help text. CLI, YAML and docs all read these fields."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), metavar: str = "", flag: str = "") -> Any:
    """A field of a config dataclass that is also an option of the command line and a key of the YAML file.

    `flag` is the option's name where it differs from the field's (dashes for underscores is not a difference).
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "flag": flag}
    if isinstance(default, list | dict | set):
        raise TypeError("give an immutable default")
    return dataclasses.field(default=default, metadata=metadata)
