"""One config out of command line, YAML file and environment, converted and checked.

Called by the subcommands and by `headrace.LLM`. The order of precedence is: command line, YAML, environment (keys
only), defaults. Every mistake is a ConfigError in one line that names the option and its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.options import EngineConfig, ServeConfig
from headrace.config.schema import build, options_of, unknown_option
from headrace.errors import ConfigError

T = TypeVar("T", ServeConfig, EngineConfig)

ENVIRONMENT = {"HEADRACE_API_KEY": "api_key", "HEADRACE_ADMIN_KEY": "admin_key"}
"""Variables that stand in for an option that nobody gave: secrets do not belong on a command line."""


def load_config(
    root: type[T],
    given: Mapping[str, Any],
    config_file: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> T:
    """The complete config. `given` holds what stood on the command line, by option key."""
    known = {option.key: option for option in options_of(root)}
    values: dict[str, Any] = {}
    for variable, key in ENVIRONMENT.items():
        if environment.get(variable) and key in known:
            values[key] = known[key].convert(environment[variable], variable)
    if config_file is not None:
        for key, (spelling, value) in _read_yaml(config_file, list(known)).items():
            values[key] = known[key].convert(value, f"{config_file}: {spelling}")
    for key, value in given.items():
        if key not in known:
            raise unknown_option(key, list(known))
        values[key] = known[key].convert(value, known[key].flag)
    return build(root, values)


def _read_yaml(config_file: str, known: list[str]) -> dict[str, tuple[str, Any]]:
    """Keys to (the key as it was written, value)."""
    import yaml

    try:
        document = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {config_file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config_file} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{config_file} is not a list of `option: value` lines")
    found: dict[str, tuple[str, Any]] = {}
    for spelling, value in document.items():
        key = str(spelling).replace("-", "_")
        if key not in known:
            raise unknown_option(
                str(spelling), [*known, *(name.replace("_", "-") for name in known)], f"{config_file}: "
            )
        if key in found:
            raise ConfigError(f"{config_file}: {spelling} is given twice")
        found[key] = (str(spelling), value)
    return found
