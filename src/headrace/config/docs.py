"""The options as a Markdown page, from the same fields as the command line. Called by tools/gen_options_docs.py."""

from __future__ import annotations

import itertools

from headrace.config.cli import KIND_METAVAR, default_text
from headrace.config.options import ServeConfig
from headrace.config.schema import Option, options_of

_HEAD = """# Options

Every option of `headrace serve`, made from the config dataclasses by `tools/gen_options_docs.py` (`make docs`).

The same names work as keys of a YAML file (`headrace serve --config server.yaml`), with dashes or underscores; the
command line wins over the file. A list in YAML is a repeated option on the command line. `HEADRACE_API_KEY` and
`HEADRACE_ADMIN_KEY` stand in for `--api-key` and `--admin-key` when neither gives one. `headrace.LLM` takes the options
of the engine (the first four tables) as keyword arguments, with underscores.
"""


def options_page() -> str:
    """The whole page, ending with a newline."""
    lines = [_HEAD]
    for group, options in itertools.groupby(options_of(ServeConfig), key=lambda option: option.group):
        lines += [f"## {group}\n", "| Option | Default | Allowed | Meaning |", "|---|---|---|---|"]
        lines += [*map(_row, options), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(option: Option) -> str:
    flag = option.flag
    if option.kind is bool:
        flag = f"{flag}, --no-{flag.removeprefix('--')}"
    elif not option.choices:
        flag = f"{flag} {option.metavar or KIND_METAVAR[option.kind]}"
    default = default_text(option)
    allowed = ", ".join(f"`{choice}`" for choice in option.choices) or option.range
    return f"| `{flag}` | {f'`{default}`' if default else ''} | {allowed} | {_cell(option.help)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
