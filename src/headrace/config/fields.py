"""How an option is declared: a dataclass field that carries its help text. CLI, YAML and docs all read these fields."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(  # budget: every parameter is one word of a declaration
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    flag: str = "",
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field of a config dataclass that is also an option of the command line and a key of the YAML file.

    `flag` is the option's name where it differs from the field's (dashes for underscores is not a difference).
    A number is checked against `minimum`, `above` (the limit itself is refused) and `maximum` when a config is loaded.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "metavar": metavar,
        "flag": flag,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
    }
    if isinstance(default, list | dict | set):
        raise TypeError("give an immutable default")
    return dataclasses.field(default=default, metadata=metadata)
