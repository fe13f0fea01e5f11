"""A bar chart of what `figures.py --json FILE` wrote, as SVG: python bench/chart.py FILE docs/figures.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.cli.bench.stats import median

LINES = ("one stream", "16 streams", "64 streams", "prefill of 512 tokens")
COLOURS = {"Headrace": "#1f6feb", "llama.cpp": "#8b949e", "OpenVINO": "#d29922"}
WIDTH, BAR, GAP, LEFT, RIGHT = 720, 16, 14, 170, 90


def draw(figures: dict[str, dict[str, list[float]]]) -> str:
    """Each line has a scale of its own: its largest bar is full."""
    parts, y = [], 34
    for x, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 120 * x}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 120 * x + 18}" y="18">{name}</text>')
    for line in LINES:
        values = {name: median(figures[name][line]) for name in COLOURS if line in figures.get(name, {})}
        if not values:
            continue
        middle = y + len(values) * BAR / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{line}</text>')
        for name, value in values.items():
            width = (WIDTH - LEFT - RIGHT) * value / max(values.values())
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR - 2}" fill="{COLOURS[name]}"/>')
            parts.append(f'<text x="{LEFT + width + 6:.0f}" y="{y + 11}">{value:,.0f}</text>')
            y += BAR
        y += GAP
    style = "<style>text{font:12px sans-serif;fill:#57606a}</style>"
    title = "<title>tokens per second, SmolLM2-135M Q4_1 on 2 cores</title>"
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{title}{style}{"".join(parts)}</svg>\n'


def main() -> None:
    figures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["figures"]
    Path(sys.argv[2]).write_text(draw(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
