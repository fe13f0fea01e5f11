"""One list of options for command line, YAML and docs; every value is converted and checked the same way."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.config.cli import add_options, given_options
from headrace.config.docs import options_page
from headrace.config.load import load_config
from headrace.config.options import EngineConfig, ServeConfig
from headrace.config.schema import Option, options_of
from headrace.errors import ConfigError

ALL = options_of(ServeConfig)


def parse(*argv: str, root: type = ServeConfig) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser, root)
    return given_options(parser.parse_args(list(argv)), root)


def load(*argv: str, yaml: Path | None = None, environment: dict[str, str] | None = None) -> ServeConfig:
    return load_config(ServeConfig, parse(*argv), str(yaml) if yaml else None, environment or {})


def sample(option: Option) -> tuple[list[str], Any]:
    """Command-line words that set the option to something else than its default, and the value that they mean."""
    if option.kind is bool:
        return [("--no-" if option.default else "--") + option.flag.removeprefix("--")], not option.default
    if option.choices:
        choice = option.choices[-1]
        return [option.flag, choice], (choice,) if option.is_repeatable else choice
    if option.metavar == "SIZE":
        return [option.flag, "3MiB"], "3MiB"
    if option.kind is str:
        text = "some-text"
        return ([option.flag, text] * 2, (text, text)) if option.is_repeatable else ([option.flag, text], text)
    value = option.kind(max(1, option.minimum or 0) if option.maximum != 1 else 0.5)
    value = value + 1 if value == option.default else value
    return [option.flag, str(value)], value


def value_of(config: Any, key: str) -> Any:
    for field in dataclasses.fields(config):
        component = getattr(config, field.name)
        if dataclasses.is_dataclass(component):
            if any(option.key == key for option in options_of(type(component))):
                return value_of(component, key)
        elif field.name == key:
            return component
    raise AssertionError(key)


def test_no_options_gives_the_defaults() -> None:
    assert load() == ServeConfig()


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.key)
def test_every_option_on_the_command_line_and_in_yaml(option: Option, tmp_path: Path) -> None:
    words, value = sample(option)
    assert value_of(load(*words), option.key) == value
    assert value != option.default
    file = tmp_path / "options.yaml"
    text = list(value) if isinstance(value, tuple) else value
    for spelling in (option.key, option.flag.removeprefix("--")):
        file.write_text(f"{spelling}: {str(text).lower() if isinstance(text, bool) else text}\n")
        assert value_of(load(yaml=file), option.key) == value


def test_every_option_is_in_the_docs() -> None:
    page = options_page()
    for option in ALL:
        assert f"`{option.flag}" in page
        assert option.help.replace("|", "\\|") in page


def test_the_docs_are_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == options_page()


def test_defaults_lie_in_their_ranges() -> None:
    for option in ALL:
        if option.default not in (None, ()):
            assert option.convert(option.default, option.flag) == option.default


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "65536"], ["--port", "65536", "0 to 65535"]),
        (["--port", "x"], ["--port", "'x'", "whole number"]),
        (["--port", "1.5"], ["--port", "whole number"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "at least 1"]),
        (["--kv-cache-fraction", "0"], ["--kv-cache-fraction", "above 0"]),
        (["--kv-cache-fraction", "nan"], ["--kv-cache-fraction"]),
        (["--drain-timeout", "inf"], ["--drain-timeout"]),
        (["--kv-cache-memory", "2 gigs"], ["--kv-cache-memory", "512MiB"]),
        (["--backend", "cuda"], ["--backend", "'cuda'", "reference-exact"]),
        (["--api-key", ""], ["--api-key", "empty"]),
        (["a", "--model", "b"], ["'a'", "'b'"]),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_positional_model_and_flag_mean_the_same() -> None:
    assert load("m") == load("--model", "m") == load("m", "--model", "m")


def test_command_line_wins_over_yaml(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("port: 1\nmax-num-seqs: 7\nenable_prefix_caching: false\napi_key: [a, b]\n")
    config = load("--port", "2", yaml=file)
    assert config.server.port == 2
    assert config.engine.scheduler.max_num_seqs == 7
    assert config.engine.cache.enable_prefix_caching is False
    assert config.server.api_key == ("a", "b")


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("max-num-seq: 3", ["max-num-seq", "did you mean 'max-num-seqs'"]),
        ("frobnicate: 3", ["unknown option 'frobnicate'"]),
        ("port: [1]", ["port", "whole number"]),
        ("port: true", ["port", "whole number"]),
        ("port: 1.5", ["port", "whole number"]),
        ("enable_prefix_caching: 1", ["enable_prefix_caching", "true or false"]),
        ("host: {a: 1}", ["host", "not text"]),
        ("port: null", ["port"]),
        ("port: 1\nPort: 2", ["unknown option 'Port'"]),
        ("max-num-seqs: 1\nmax_num_seqs: 2", ["twice"]),
        ("- port", ["option: value"]),
        ("a: b: c", ["not YAML"]),
        ("? [1]\n: 2", ["options.yaml"]),
    ],
)
def test_a_bad_yaml_is_one_line_that_names_file_and_key(yaml: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        load(yaml=file)
    message = str(caught.value)
    assert "\n" not in message
    assert "options.yaml" in message
    assert all(word in message for word in words), message


def test_yaml_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(yaml=tmp_path / "nowhere.yaml")
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert load(yaml=file) == ServeConfig()


def test_keys_from_the_environment_only_when_none_is_given() -> None:
    environment = {"HEADRACE_API_KEY": "from-environment", "HEADRACE_ADMIN_KEY": "admin"}
    config = load(environment=environment)
    assert config.server.api_key == ("from-environment",)
    assert config.server.admin_key == ("admin",)
    assert load("--api-key", "given", environment=environment).server.api_key == ("given",)


def test_engine_config_alone_refuses_server_options() -> None:
    config = load_config(EngineConfig, {"max_model_len": 64, "kv_cache_memory": "1MiB"}, environment={})
    assert (config.model.max_model_len, config.cache.kv_cache_memory) == (64, "1MiB")
    with pytest.raises(ConfigError, match="'max_model_len'"):
        load_config(EngineConfig, {"max_model_length": 64}, environment={})
    with pytest.raises(ConfigError, match="unknown option 'port'"):
        load_config(EngineConfig, {"port": 64}, environment={})
