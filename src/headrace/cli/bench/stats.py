"""The arithmetic of the benchmarks: percentiles, and one round's numbers from its requests. Prints nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Trial:
    """What one request showed; times in seconds since the round began."""

    start_s: float
    first_s: float | None = None  # first chunk with text
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)  # arrival of each chunk with text
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds per token between chunks. A chunk may hold several tokens: usage says how many there were in all."""
        num_gaps = len(self.chunk_s) - 1
        if num_gaps < 1:
            return []
        tokens_per_gap = max(1.0, (self.output_tokens - 1) / num_gaps)
        pairs = zip(self.chunk_s, self.chunk_s[1:], strict=False)
        return [(later - earlier) / tokens_per_gap for earlier, later in pairs]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks, as numpy's default. `values` need not be sorted, but not be empty."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def spread(values: Sequence[float]) -> str:
    """ "median (lowest to highest)", or the one value there is."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def summarise(trials: Sequence[Trial], duration_s: float) -> dict[str, Any]:
    """One round as plain data: throughput, latencies in ms, failures by reason."""
    done = [trial for trial in trials if trial.error is None]
    output_tokens = sum(trial.output_tokens for trial in done)
    prompt_tokens = sum(trial.prompt_tokens for trial in done)
    return {
        "num_requests": len(trials),
        "num_failed": len(trials) - len(done),
        "failures": dict(Counter(trial.error for trial in trials if trial.error is not None).most_common()),
        "duration_s": duration_s,
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": output_tokens / duration_s,
        "total_tokens_per_s": (output_tokens + prompt_tokens) / duration_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "ttft_ms": _latencies([trial.first_s - trial.start_s for trial in done if trial.first_s is not None]),
        "inter_token_ms": _latencies([gap for trial in done for gap in trial.gaps_s]),
        "e2e_ms": _latencies([trial.end_s - trial.start_s for trial in done]),
    }


def _latencies(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    found = {f"p{percent}": percentile(seconds, percent) * 1000 for percent in PERCENTILES}
    return {"mean": sum(seconds) / len(seconds) * 1000, **found}


def write_json(path: str, report: dict[str, Any]) -> None:
    """For `--json FILE`."""
    try:
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}") from error
