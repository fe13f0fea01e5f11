"""Sampling defaults: the model's advice, the option that wins over it, and what is refused."""

from __future__ import annotations

import json

import pytest

from headrace.config.generation import parse_defaults, resolve_model_config
from headrace.config.options import ModelConfig
from headrace.errors import ConfigError

ADVICE = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 2], "do_sample": True, "top_k": None}


def defaults_of(**options: str) -> dict[str, object]:
    model = resolve_model_config(ModelConfig(**options), "name", ADVICE)  # type: ignore[arg-type]
    return parse_defaults(model.override_generation_config)


def test_the_models_advice_counts_and_the_option_wins() -> None:
    assert defaults_of() == {"temperature": 0.6, "top_p": 0.95}
    override = json.dumps({"temperature": 0, "min_p": 0.1})
    assert defaults_of(override_generation_config=override) == {"temperature": 0, "top_p": 0.95, "min_p": 0.1}
    assert defaults_of(generation_config="none") == {}


def test_a_served_name_is_filled_in_once() -> None:
    assert resolve_model_config(ModelConfig(), "name", {}).served_model_name == ("name",)
    assert resolve_model_config(ModelConfig(served_model_name=("a", "b")), "name", {}).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"temprature": 1}', "'temprature' has no default; allowed: temperature"),
        ('{"temperature": -1}', "temperature is -1, allowed: at least 0"),
        ('{"temperature": "hot"}', "temperature is 'hot'"),
        ('{"top_p": 0}', "top_p is 0, allowed: above 0"),
        ('{"top_k": 1.5}', "top_k is 1.5, allowed: an integer"),
        ('{"min_p": true}', "min_p is True"),
        ('{"temperature": Infinity}', "temperature is inf"),
    ],
)
def test_a_bad_default_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_defaults(text)
    assert "\n" not in str(caught.value)
