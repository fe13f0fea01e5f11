"""What `/metrics` shows of the whole server, whichever front end is asked.

The HTTP layer calls the `count_*` and `observe` methods on its event loop; they are a dictionary or bisect step each
and take no lock. Each front end counts on a page of its own (totals.py); a scrape adds the pages up. Engine series come
from the status board alone and are the same everywhere, so nothing adds up twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from headrace.observability.aliases import collect_aliases
from headrace.observability.engine_series import PREFIX, EngineNumbers, collect_engine
from headrace.observability.totals import Buckets, Page

CONTENT_TYPE = CONTENT_TYPE_LATEST

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.15,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
CHOICES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Generated tokens of a request, over all choices", TOKENS),
    "request_params_max_tokens": ("max_tokens of a request after clamping", TOKENS),
    "request_params_n": ("n of a request", CHOICES),
    "time_to_first_token_seconds": ("From receipt of the request to the first token", SECONDS),
    "inter_token_latency_seconds": (
        "Between consecutive tokens of a choice, as this front end got them",
        SHORT_SECONDS,
    ),
    "e2e_request_latency_seconds": ("From receipt of the request to the last token", SECONDS),
    "request_queue_time_seconds": ("In the engine's queue", SECONDS),
    "request_prefill_time_seconds": ("From first scheduled to first token", SECONDS),
    "request_decode_time_seconds": ("From first to last token", SECONDS),
    "event_loop_lag_seconds": ("How late the front end's event loop woke up", SHORT_SECONDS),
    "gc_pause_seconds": ("For how long the garbage collector stopped the front end", SHORT_SECONDS),
}
COUNTERS: dict[str, tuple[str, str]] = {
    "request_success": ("Ended choices", "finished_reason"),
    "admission_rejections": ("Requests refused before the engine saw them", "reason"),
    "aborts": ("Choices that were aborted", "reason"),
}
EXPECTED = (
    *(("request_success", reason) for reason in ("stop", "length", "abort", "error")),
    ("admission_rejections", "queue_full"),
    ("aborts", "disconnect"),
)
"""Label values that are shown from the start: a series that exists can be alerted on."""


PER_FRONT_END = frozenset({"event_loop_lag_seconds", "gc_pause_seconds"})
"""Histograms of a process, not of requests: one per front end, under the label `front_end`."""


class Metrics(Collector):
    """One per front end, with its own registry. Not thread-safe: everything happens on the event loop."""

    def __init__(
        self,
        model_name: str,
        engine: Callable[[], EngineNumbers],
        *,
        front_end: int = 0,
        num_front_ends: int = 1,
        directory: Path | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """`directory`: where the front ends of a server find one another's pages; None: this one is alone.
        `aliases`: servers under whose names the series are shown too."""
        self._engine = engine
        self._aliases = tuple(dict.fromkeys(aliases))
        self._labels = {"model_name": model_name}
        self._pages = {front_end: _page(None)}
        if directory is not None:
            self._pages = {index: _page(directory / f"metrics-{index}") for index in range(num_front_ends)}
        own = self._pages[front_end]
        self._histograms, self._counters = own.histograms, own.counters
        for name, value in EXPECTED:
            self._counters[name].add(value, 0)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def histogram(self, name: str) -> Buckets:
        """The buckets themselves, for a caller that observes often."""
        return self._histograms[name]

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def count_finished(self, finished_reason: str) -> None:
        self._counters["request_success"].add(finished_reason)

    def count_rejection(self, reason: str) -> None:
        self._counters["admission_rejections"].add(reason)

    def count_aborts(self, reason: str, num_choices: int = 1) -> None:
        if num_choices:
            self._counters["aborts"].add(reason, num_choices)

    def render(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families = [*collect_engine(self._engine(), self._labels), *self._collect_requests()]
        yield from families
        for server in self._aliases:
            yield from collect_aliases(server, families)

    def _collect_requests(self) -> Iterable[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, (documentation, label) in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, documentation, labels=[*names, label])
            totals: Counter[str] = Counter()
            for page in self._pages.values():
                for value, count in page.counters[name].items():
                    totals[value] += int(count)
            for value, total in totals.items():
                family.add_metric([*values, value], total)
            yield family
        for name, (documentation, bounds) in HISTOGRAMS.items():
            if name in PER_FRONT_END:
                histogram = HistogramMetricFamily(PREFIX + name, documentation, labels=[*names, "front_end"])
                for index, page in self._pages.items():
                    _add(histogram, [*values, str(index)], page.histograms[name])
            else:
                histogram = HistogramMetricFamily(PREFIX + name, documentation, labels=names)
                summed = Buckets(bounds)
                for page in self._pages.values():
                    summed.add(page.histograms[name])
                _add(histogram, values, summed)
            yield histogram


def _page(path: Path | None) -> Page:
    return Page({name: bounds for name, (_, bounds) in HISTOGRAMS.items()}, tuple(COUNTERS), path)


def _add(family: HistogramMetricFamily, labels: list[str], buckets: Buckets) -> None:
    family.add_metric(labels, buckets.cumulative(), buckets.total)
