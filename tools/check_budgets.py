"""House-style budgets: at most 400 lines a file, 60 lines a function, 8 parameters; a docstring per module.

A function may exceed its budget with `# budget: <reason>` on its `def` line, a file with the same on its first line.
Called by `make check`; prints each excess and exits 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "tools", "bench")
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8
ALLOWED = re.compile(r"#\s*budget:\s*\S+")


def main() -> int:
    problems = [
        problem for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) for problem in check_file(path)
    ]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


def check_file(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if len(lines) > FILE_LINES and not ALLOWED.search(lines[0]):
        yield f"{name}: {len(lines)} lines, the budget is {FILE_LINES}"
    tree = ast.parse(text, str(path))
    if lines and path.name != "__init__.py" and ast.get_docstring(tree) is None:
        yield f"{name}: no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from check_function(node, lines, f"{name}:{node.lineno}")


def check_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], where: str) -> Iterator[str]:
    if ALLOWED.search(lines[node.lineno - 1]):
        return
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > FUNCTION_LINES:
        yield f"{where}: {node.name} has {num_lines} lines, the budget is {FUNCTION_LINES}"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    num_parameters = sum(argument.arg not in ("self", "cls") for argument in arguments)
    if num_parameters > PARAMETERS:
        yield f"{where}: {node.name} takes {num_parameters} parameters, the budget is {PARAMETERS}"


if __name__ == "__main__":
    raise SystemExit(main())
