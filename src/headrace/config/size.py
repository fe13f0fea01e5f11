"""Sizes of memory as people write them. Used wherever an option takes a SIZE."""

from __future__ import annotations

import re

from headrace.errors import ConfigError

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    spelling: base**power
    for power, letter in enumerate("kmgt", start=1)
    for spelling, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2GiB", "1.5G", "1000000" or "4GB" (decimal). Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write a number and a unit, such as 512MiB or 2GiB")
    return int(float(match["number"]) * _UNITS[match["unit"].lower()])


def format_size(num_bytes: int) -> str:
    """The shortest honest form: "512 MiB", "1.5 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
