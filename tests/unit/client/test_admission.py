"""Admission: all or none, bounded over all front ends, released exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.admission import Admission, Permit
from headrace.config.options import AdmissionConfig
from headrace.errors import InvalidRequest, QueueFull
from headrace.testing.clock import FakeClock


def test_a_permit_releases_once() -> None:
    seen: list[tuple[int, int]] = []
    admission = Admission(AdmissionConfig(), on_change=lambda *held: seen.append(held))
    permit = admission.admit(3, 10)
    permit.release_part(1, 4)
    permit.release()
    permit.release()
    permit.release_part(1, 1)
    assert seen == [(3, 10), (2, 6), (0, 0)]


def test_what_other_front_ends_hold_counts() -> None:
    others = (6, 50)
    admission = Admission(AdmissionConfig(max_queued_requests=8, max_queued_tokens=100), others=lambda: others)
    with pytest.raises(QueueFull) as caught:
        admission.admit(3, 1)
    assert caught.value.info().status == 429
    with pytest.raises(QueueFull, match="prompt tokens"):
        admission.admit(1, 51)
    assert (admission.num_choices, admission.num_tokens, admission.num_rejected) == (0, 0, 2)
    admission.admit(2, 50)


def test_what_could_never_fit_is_a_bad_request() -> None:
    admission = Admission(AdmissionConfig(max_queued_requests=8, max_queued_tokens=100))
    with pytest.raises(InvalidRequest, match="--max-queued-requests"):
        admission.admit(9, 1)
    with pytest.raises(InvalidRequest, match="--max-queued-tokens"):
        admission.admit(1, 101)


def test_retry_after_follows_the_waits_of_late() -> None:
    clock = FakeClock()
    admission = Admission(AdmissionConfig(), clock=clock)
    assert admission.retry_after_s == 1
    for _ in range(50):
        permit = admission.admit(1, 1)
        clock.advance(7.5)
        permit.release()
    assert admission.retry_after_s == 8
    for _ in range(50):
        permit = admission.admit(1, 1)
        clock.advance(1000)
        permit.release()
    assert admission.retry_after_s == 60


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 30)), max_size=60))
def test_counts_are_those_of_the_living_permits(steps: list[tuple[bool, int, int]]) -> None:
    admission = Admission(AdmissionConfig(max_queued_requests=8, max_queued_tokens=60))
    held: list[Permit] = []
    for is_admission, num_choices, num_tokens in steps:
        if is_admission:
            fits = admission.num_choices + num_choices <= 8 and admission.num_tokens + num_tokens <= 60
            try:
                held.append(admission.admit(num_choices, num_tokens))
                assert fits
            except QueueFull:
                assert not fits
        elif held:
            held[num_tokens % len(held)].release_part(num_choices, num_tokens)
        assert admission.num_choices == sum(permit.num_choices for permit in held) <= 8
        assert admission.num_tokens == sum(permit.num_tokens for permit in held) <= 60
    for permit in held:
        permit.release()
    assert (admission.num_choices, admission.num_tokens) == (0, 0)
