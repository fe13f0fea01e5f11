"""Writes docs/options.md from the config dataclasses; with --check it only says whether the page is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.config.docs import options_page

PAGE = Path(__file__).parent.parent / "docs" / "options.md"


def main() -> int:
    page = options_page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            print("docs/options.md does not match the options: run `make docs`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
