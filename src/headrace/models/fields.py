"""Typed, bounded reading of checkpoint metadata: every wrong value is a `CheckpointError` that names field, value and
range.

Used by the config mappers. Counts are bounded so that a corrupt number cannot make a huge loop or allocation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.errors import CheckpointError

MAX_COUNT = 1 << 24
_MISSING = object()


class Fields:
    """A mapping of unchecked values. A null counts as absent, and a default stands in for an absent one."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def raw(self, key: str) -> Any:
        """The value as it is, None when absent."""
        return self.values.get(self.prefix + key)

    def refuse(self, key: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.prefix}{key} is {repr(value)[:80]}; allowed: {allowed}")

    def _value(self, key: str, default: Any, allowed: str) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.where}: {self.prefix}{key} is missing; allowed: {allowed}")
        return default

    def integer(self, key: str, default: Any = _MISSING, low: int = 1, high: int = MAX_COUNT) -> int:
        allowed = f"{low} to {high}"
        value = self._value(key, default, allowed)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, value, allowed)
        return value

    def number(self, key: str, default: Any = _MISSING, low: float = 0.0) -> float:
        """A finite number above `low`."""
        allowed = f"a finite number above {low:g}"
        value = self._value(key, default, allowed)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= low:
            raise self.refuse(key, value, allowed)
        return float(value)

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        value = self._value(key, default, "true, false")
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true, false")
        return value

    def string(self, key: str, default: Any = _MISSING) -> str:
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.refuse(key, value, "a string")
        return value

    def section(self, key: str) -> Fields:
        """A nested object, empty when absent."""
        value = self._value(key, {}, "an object")
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "an object")
        return Fields(value, f"{self.where}: {self.prefix}{key}")
