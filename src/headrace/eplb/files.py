"""Maps and loads in JSON files: an array of rows, one for each layer with experts, or an object that has it under
`slots` or `tokens`, such as GET /v1/experts gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError


def read_rows(option: str, file: str, name: str) -> list[Any]:
    """What the rows hold is not looked at. `option` is what a person gave the file for. Raises ConfigError."""
    try:
        found = msgspec.json.decode(Path(file).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {option} {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{option} {file} is no JSON: {error}") from error
    rows = found.get(name) if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise ConfigError(f"{option} {file} holds neither an array of rows nor an object with {name}")
    return rows


def read_slots(option: str, file: str) -> list[list[int]]:
    """The expert in each slot, [layers with experts][slots], of whatever model. Raises ConfigError."""
    try:
        return msgspec.convert(read_rows(option, file, "slots"), list[list[int]])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{option} {file} holds no rows of whole numbers: {error}") from error
