"""Stop strings: found across any cut of the text, held back in time, the earliest wins."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.processing.stop import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end of any stop string, the longest that ends there, on the whole text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(stops: list[str], parts: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include=include)
    out = [matcher.push(part) for part in parts]
    return [*out, matcher.flush()], matcher.matched


letters = st.text("abc", max_size=24)


@settings(max_examples=400, deadline=None)
@given(
    text=letters,
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 24), max_size=10),
    include=st.booleans(),
)
def test_equals_a_search_of_the_whole_text(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    out, matched = run(stops, parts, include=include)
    assert ("".join(out), matched) == naive(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(text=letters, stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4))
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    matcher, emitted = StopMatcher(stops), ""
    for index, char in enumerate(text):
        emitted += matcher.push(char)
        if matcher.matched is not None:
            return
        seen = text[: index + 1]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert emitted == seen[: len(seen) - longest]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["ABC", "DEF", "GHI", "JKL"], "ABC"),
        (["DEFGHIJ", "x"], ""),
        (["xDEFDEFGHI", "J"], "xDEF"),
        (["D"] * 3 + ["EFGHIJ"], "DD"),
        (["DEFGHI", "K"], "DEFGHIK"),
    ],
)
def test_match_across_borders(parts: list[str], expected: str) -> None:
    out, _ = run(["DEFGHIJ"], parts)
    assert "".join(out) == expected


def test_match_that_ends_first_wins_and_longest_of_those() -> None:
    assert run(["bcd", "c"], ["abcd"]) == (["ab", ""], "c")
    assert run(["c", "bc"], ["abcd"]) == (["a", ""], "bc")


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert matcher.push("c") == ""
    assert matcher.flush() == ""
    assert (matcher.matched, matcher.match_start) == (".", 1)


def test_unarmed_text_can_begin_a_match_but_not_end_one() -> None:
    matcher = StopMatcher(["ab", "b"])
    assert matcher.push("ba", armed=False) == "b"
    assert matcher.push("b") == ""
    assert matcher.matched == "ab"
    late = StopMatcher(["abc", "b"])
    assert late.push("ab", armed=False) == ""
    assert late.push("x") == "abx"  # the b came while unarmed
    assert late.matched is None


def test_a_long_stop_string_that_nearly_matches_is_cheap() -> None:
    matcher = StopMatcher(["a" * 255 + "b"])
    text = "".join(matcher.push("a") for _ in range(5000)) + matcher.flush()
    assert text == "a" * 5000
