"""`headrace chat`: a conversation in the terminal; the model runs in this process, or behind `--url`.

On a terminal it edits lines, takes commands and shows speed after each answer; Ctrl-C stops an answer, not the program.
With its input piped it reads one message a line and prints plain answers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from headrace.cli.sources import TextSource, add_source_arguments, open_source, sampling_of
from headrace.errors import RequestError

HELP = """\
  /clear          forget the conversation
  /system TEXT    set the system prompt and start anew; without TEXT: remove it
  /help           this list
  /quit           leave (Ctrl-D too)
A line that ends with \\ goes on in the next one; \"\"\" opens and closes a message of many lines.
Ctrl-C stops an answer."""
BLOCK = '"""'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headrace chat [MODEL | --url URL] [options]"
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_source_arguments(parser, temperature=None, max_tokens=None, positional=True)


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    what = "connecting" if args.url else "loading the model"
    with console.status(what) if is_terminal else contextlib.nullcontext():
        source = open_source(args)
    with closing(source):
        conversation = Conversation(source, sampling_of(args), args.system)
        if is_terminal:
            _talk(conversation, console)
            return 0
        return _answer_lines(conversation, console)


@dataclass(slots=True)
class Speed:
    """How an answer went."""

    first_s: float | None = None
    total_s: float = 0.0
    num_tokens: int | None = None
    was_stopped: bool = False

    def __str__(self) -> str:
        parts = ["stopped"] if self.was_stopped else []
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens")
            if self.first_s is not None and self.num_tokens > 1 and self.total_s > self.first_s:
                parts.append(f"{(self.num_tokens - 1) / (self.total_s - self.first_s):.1f} tokens/s")
        if self.first_s is not None:
            parts.append(f"first token after {self.first_s:.2f} s")
        return " · ".join(parts)


@dataclass(slots=True)
class Conversation:
    """The messages so far. An exchange is kept once there is an answer, or a part of one."""

    source: TextSource
    sampling: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def clear(self, system: str | None) -> None:
        self.system = system
        self.messages = []

    def ask(self, text: str, write: Callable[[str], None]) -> Speed:
        """Writes the answer as it comes. KeyboardInterrupt ends the answer; what there is of it is kept."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        answer: list[str] = []
        speed = Speed()
        start = time.perf_counter()
        try:
            with closing(self.source.chat([*system, *self.messages, question], self.sampling)) as pieces:
                for piece in pieces:
                    if piece.text and speed.first_s is None:
                        speed.first_s = time.perf_counter() - start
                    if piece.num_tokens is not None:
                        speed.num_tokens = piece.num_tokens
                    answer.append(piece.text)
                    write(piece.text)
        except KeyboardInterrupt:
            speed.was_stopped = True
        speed.total_s = time.perf_counter() - start
        if any(answer):
            self.messages += [question, {"role": "assistant", "content": "".join(answer)}]
        return speed


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _answer_lines(conversation: Conversation, console: Console) -> int:
    code = 0
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            speed = conversation.ask(line.strip(), _write)
        except RequestError as error:
            code = 1
            console.print(f"headrace: {error.message}", markup=False)
            continue
        print(flush=True)
        if speed.was_stopped:
            raise KeyboardInterrupt  # piped, Ctrl-C means the whole program
    return code


def _talk(conversation: Conversation, console: Console) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # `input` then edits and remembers lines
    console.print(f"[bold]{escape(conversation.source.name)}[/bold]  [dim]/help lists the commands[/dim]")
    while True:
        try:
            message = _read_message().strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("[dim](Ctrl-D or /quit leaves)[/dim]")
            continue
        if message.startswith("/"):
            if not _command(conversation, message, console):
                return
        elif message:
            _show_answer(conversation, message, console)


def _read_message() -> str:
    line = input("\001\033[1;36m\002> \001\033[0m\002")  # \001 and \002 tell readline what has no width
    if line.lstrip().startswith(BLOCK):
        lines = [line.lstrip().removeprefix(BLOCK)]
        while BLOCK not in lines[-1]:
            lines.append(input("  "))
        return "\n".join([*lines[:-1], lines[-1].split(BLOCK)[0]])
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  "))
    return "\n".join(lines)


def _command(conversation: Conversation, message: str, console: Console) -> bool:
    """Does what a line that starts with a slash says; False: leave."""
    command, _, rest = message.partition(" ")
    match command:
        case "/quit" | "/exit" | "/q":
            return False
        case "/clear":
            conversation.clear(conversation.system)
            console.print("[dim]the conversation is forgotten[/dim]")
        case "/system":
            conversation.clear(rest.strip() or None)
            console.print(f"[dim]system prompt {'set' if rest.strip() else 'removed'}; a new conversation begins[/dim]")
        case "/help" | "/?":
            console.print(HELP, markup=False)
        case _:
            console.print(f"unknown command {command}; /help lists them", markup=False)
    return True


def _show_answer(conversation: Conversation, message: str, console: Console) -> None:
    try:
        speed = conversation.ask(message, _write)
    except RequestError as error:
        hint = "  (/clear starts a new conversation)" if error.code == "context_length_exceeded" else ""
        console.print(f"{error.message}{hint}", markup=False, style="red")
        return
    print(flush=True)
    console.print(str(speed), style="dim", markup=False)
