"""The breaker: what opens it, what it lets pass, how it comes back."""

from __future__ import annotations

import random

import pytest

from kvstore.health import Breaker, BreakerState


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(random.Random(1))
    breaker.trip(now)
    return breaker


def test_a_new_breaker_lets_everything_pass() -> None:
    breaker = Breaker()
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.admit(0.0) and not breaker.blocked(0.0)


def test_a_few_failures_among_many_successes_do_not_open_it() -> None:
    breaker = Breaker()
    for n in range(100):
        if n % 3:
            breaker.succeeded()
        else:
            assert not breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_it_opens_when_half_of_the_recent_operations_fail() -> None:
    breaker = Breaker()
    for _ in range(7):
        assert not breaker.failed(0.0), "too few to judge"
    assert breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert breaker.blocked(0.0) and not breaker.admit(0.0)


def test_old_successes_do_not_hide_recent_failures() -> None:
    breaker = Breaker()
    for _ in range(1000):
        breaker.succeeded()
    failures = 0
    while not breaker.failed(0.0):
        failures += 1
    assert failures < 32


def test_it_opens_at_the_second_hang_in_a_row() -> None:
    breaker = Breaker()
    assert not breaker.failed(0.0, hang=True)
    breaker.succeeded()
    assert not breaker.failed(0.0, hang=True)
    assert breaker.failed(0.0, hang=True)


def test_hangs_count_by_kind() -> None:
    breaker = Breaker()
    assert not breaker.failed(0.0, "read", hang=True)
    breaker.succeeded("probe")
    assert breaker.failed(0.0, "read", hang=True)


def test_half_open_lets_one_trial_pass() -> None:
    breaker = opened()
    assert breaker.state(0.9) is BreakerState.OPEN
    assert breaker.state(1.3) is BreakerState.HALF_OPEN
    assert not breaker.blocked(1.3)
    assert breaker.admit(1.3) and breaker.on_trial
    assert breaker.blocked(1.3) and not breaker.admit(1.3)


def test_a_good_trial_closes_it() -> None:
    breaker = opened()
    breaker.admit(2.0)
    assert breaker.succeeded()
    assert breaker.state(2.0) is BreakerState.CLOSED
    assert not breaker.failed(2.0), "earlier failures are forgotten"


def test_hangs_of_an_outage_are_forgotten_when_it_ends() -> None:
    breaker = opened()
    for _ in range(5):
        breaker.failed(0.5, "read", hang=True)
    breaker.admit(2.0)
    assert breaker.succeeded("probe")
    assert not breaker.failed(2.0, "read")


def test_a_late_success_from_before_it_opened_is_no_trial() -> None:
    breaker = opened()
    assert not breaker.succeeded()
    assert breaker.state(0.5) is BreakerState.OPEN


def test_a_bad_trial_opens_it_for_longer_each_time_up_to_a_minute() -> None:
    breaker, now = opened(), 0.0
    lengths = []
    for _ in range(10):
        start = now
        while breaker.blocked(now):
            now += 0.05
        lengths.append(now - start)
        assert breaker.admit(now)
        breaker.failed(now)
    for n, length in enumerate(lengths):
        shortest = min(60.0, 2.0**n)
        assert shortest <= length <= 1.25 * shortest + 0.1
    assert breaker.openings == 11


def test_cool_downs_are_jittered() -> None:
    ends = set()
    for seed in range(20):
        breaker = Breaker(random.Random(seed))
        breaker.trip(0.0)
        ends.add(next(n for n in range(200) if not breaker.blocked(n / 100)))
    assert len(ends) > 10 and min(ends) >= 100 and max(ends) <= 126


@pytest.mark.parametrize("hang", [False, True])
def test_failures_while_open_change_nothing(hang: bool) -> None:
    breaker = opened()
    assert not any(breaker.failed(0.5, hang=hang) for _ in range(20))
    assert breaker.openings == 1
    assert breaker.state(1.3) is BreakerState.HALF_OPEN


def test_answers_of_another_kind_close_it_but_do_not_clear_the_suspect() -> None:
    breaker = Breaker(random.Random(1))
    now, pauses = 0.0, []
    for hang in ("first", "second", None, None, None):
        while not breaker.failed(now, "read", hang=True):
            assert hang, "after a trial by a probe, one more hang is enough"
        pauses.append(next(s for s in range(1, 200) if breaker.state(now + s) is BreakerState.HALF_OPEN))
        now += pauses[-1]
        assert breaker.admit(now) and breaker.succeeded("probe")
    assert pauses == sorted(pauses) and pauses[-1] >= 8 * pauses[0], "each pause is twice as long"
    breaker.succeeded("read")
    assert not breaker.failed(now, "read", hang=True), "cleared: it takes two again"
