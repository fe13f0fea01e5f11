"""How `--help` looks: wide enough columns, and flags that do not repeat their placeholder. Used by all subcommands."""

from __future__ import annotations

import argparse
import shutil


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, with room for long option names."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((110, 24)).columns, 120) - 2
        super().__init__(prog, max_help_position=34, width=width)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        # argparse forgets that the names of subcommands stand further in.
        for each in self._iter_indented_subactions(action):
            length = len(self._format_action_invocation(each)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # "--x, --no-x" becomes "--[no-]x".
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)
