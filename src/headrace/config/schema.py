"""The config dataclasses as a flat list of options: the one source of command line, YAML keys and documentation.

`cli.py`, `load.py` and `docs.py` read it, as does `headrace.LLM` for its keyword arguments. It also checks and converts
one value (`Option.convert`) and builds a config from values by name (`build`).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from headrace.config.size import parse_size
from headrace.errors import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option: a field of a component's dataclass."""

    key: str  # the field's name; unique among all options
    group: str  # the component's first docstring line
    kind: type  # str, int, float or bool: of one value
    is_optional: bool
    is_repeatable: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    metavar: str
    flag: str  # with its dashes
    minimum: float | None
    above: float | None
    maximum: float | None

    @property
    def range(self) -> str:
        """The allowed numbers, in words; empty when all are."""
        has_maximum = self.maximum is not None and self.maximum < 2**62  # above that it is only the width of a field
        if self.minimum is not None and has_maximum:
            return f"{self.minimum:g} to {self.maximum:g}"
        parts = [f"at least {self.minimum:g}"] if self.minimum is not None else []
        parts += [f"above {self.above:g}"] if self.above is not None else []
        parts += [f"at most {self.maximum:g}"] if has_maximum else []
        return ", ".join(parts)

    def convert(self, value: Any, source: str) -> Any:
        """The value as the field's type, from text or from YAML. Raises ConfigError that names `source`."""
        if value is None and self.is_optional:
            return None
        if not self.is_repeatable:
            return self._convert_one(value, source)
        values = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
        return tuple(self._convert_one(item, source) for item in values)

    def _convert_one(self, value: Any, source: str) -> Any:
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{source}: {value!r} is not true or false")
            return value
        if self.kind is str:
            return self._convert_text(value, source)
        return self._convert_number(value, source)

    def _convert_text(self, value: Any, source: str) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{source}: {value!r} is not text")
        text = str(value)
        if not text:
            raise ConfigError(f"{source}: the value is empty")
        if self.choices and text not in self.choices:
            raise ConfigError(f"{source}: {text!r} is not one of {', '.join(self.choices)}")
        if self.metavar == "SIZE":
            try:
                parse_size(text)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from error
        return text

    def _convert_number(self, value: Any, source: str) -> int | float:
        noun = "a whole number" if self.kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{source}: {value!r} is not {noun}")
        try:
            number: int | float = self.kind(value)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{source}: {value!r} is not {noun}") from error
        if not math.isfinite(number) or (isinstance(value, float) and number != value):
            raise ConfigError(f"{source}: {value!r} is not {noun}")
        is_low = self.minimum is not None and number < self.minimum
        is_low = is_low or (self.above is not None and number <= self.above)
        if is_low or (self.maximum is not None and number > self.maximum):
            raise ConfigError(f"{source}: {value} is out of range, allowed: {self.range}")
        return number


def options_of(root: type) -> tuple[Option, ...]:
    """All options of a config dataclass and the components that it composes, in order of declaration."""
    found: list[Option] = []
    hints = typing.get_type_hints(root)
    for field in dataclasses.fields(root):
        if dataclasses.is_dataclass(hints[field.name]):
            found += options_of(hints[field.name])
        else:
            found.append(_option(root, field, hints[field.name]))
    assert len({option.key for option in found}) == len(found), "an option's name is unique among all components"
    return tuple(found)


def build(root: type[T], values: Mapping[str, Any]) -> T:
    """The config with these values (by option key) and defaults for the rest. Unknown keys raise ConfigError."""
    known = [option.key for option in options_of(root)]
    for key in values:
        if key not in known:
            raise unknown_option(key, known)
    return _build(root, values)


def unknown_option(key: str, known: Sequence[str], where: str = "") -> ConfigError:
    """The error for a name that is no option, with the nearest one that is."""
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ConfigError(f"{where}unknown option {key!r}{hint}")


def _build(root: type[T], values: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(root)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(root):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return root(**arguments)


def _option(root: type, field: dataclasses.Field[Any], hint: Any) -> Option:
    arguments = typing.get_args(hint)
    is_union = isinstance(hint, types.UnionType)
    is_repeatable = typing.get_origin(hint) is tuple
    kind = next(argument for argument in arguments if argument is not type(None)) if arguments else hint
    assert kind in (str, int, float, bool), f"{root.__name__}.{field.name}: no option has type {hint}"
    meta = field.metadata
    return Option(
        key=field.name,
        group=(root.__doc__ or root.__name__).strip().splitlines()[0].rstrip("."),
        kind=kind,
        is_optional=is_union,
        is_repeatable=is_repeatable,
        default=field.default,
        help=meta["help"],
        choices=meta["choices"],
        metavar=meta["metavar"],
        flag="--" + (meta["flag"] or field.name.replace("_", "-")),
        minimum=meta["minimum"],
        above=meta["above"],
        maximum=meta["maximum"],
    )
