"""Sampling defaults: what a request gets for the fields that it leaves out.

They come from the model (its generation_config.json, or what its publisher recommends for an alias) and from
`--override-generation-config`, which wins; `--generation-config none` ignores the model's. Resolved once, at start,
into the option itself, so that every process reads the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.config.options import ModelConfig
from headrace.errors import ConfigError

RANGES = {
    "temperature": (0.0, math.inf, "at least 0"),
    "top_p": (1e-9, 1.0, "above 0, at most 1"),
    "top_k": (-1, 2**31 - 1, "an integer of at least -1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "repetition_penalty": (1e-6, 1e6, "above 0"),
}
"""The fields that have a default, which are those of vLLM."""


def parse_defaults(text: str | None, source: str = "--override-generation-config") -> dict[str, Any]:
    """Sampling fields of a JSON object. Raises ConfigError that names the field and the range."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {text[:60]!r} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f'{source}: {text[:60]!r} is not a JSON object such as {{"temperature": 0.2}}')
    for name, value in given.items():
        if name not in RANGES:
            raise ConfigError(f"{source}: {name!r} has no default; allowed: {', '.join(RANGES)}")
        low, high, allowed = RANGES[name]
        is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        if not (is_number and low <= value <= high and math.isfinite(value)):
            raise ConfigError(f"{source}: {name} is {value!r}, allowed: {allowed}")
    return given


def resolve_model_config(model: ModelConfig, name: str, recommended: Mapping[str, Any]) -> ModelConfig:
    """The same with its served name and its sampling defaults filled in. `recommended` is the model's own advice."""
    known = {key: value for key, value in recommended.items() if key in RANGES and value is not None}
    if model.generation_config == "none":
        known = {}
    defaults = {**parse_defaults(json.dumps(known), "the model's generation config"),
                **parse_defaults(model.override_generation_config)}  # fmt: skip
    return dataclasses.replace(
        model,
        served_model_name=model.served_model_name or (name,),
        override_generation_config=json.dumps(defaults) if defaults else None,
    )
