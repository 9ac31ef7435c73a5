"""Two or more ways to do the same work, timed in turns within one run.

Absolute figures come from the machine of the day; a ratio of neighbours in time does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 9


def nothing() -> None:
    """A side without preparations."""


class Side(NamedTuple):
    """One way to do the work: only `run` is timed."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    clean_up: Callable[[], object] = nothing


def compare(
    benchmark: BenchmarkFixture,
    ours: Side,
    *others: Side,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Time `ours` against each of `others`, which go first and second in turns.

    One more round warms up. The figures are in ``extra_info`` of the benchmark, too. What waits for nothing
    can go by ``clock=time.thread_time``, which does not see what else the machine does.

    Returns
    -------
    dict
        Name of another side -> speed of ours as a multiple of its speed: median of the rounds.
    """
    seconds: dict[str, list[float]] = {side.name: [] for side in (ours, *others)}

    def run_ours() -> None:
        started = clock()
        ours.run()
        seconds[ours.name].append(clock() - started)

    def run_others() -> None:
        for side in others:
            side.prepare()
            started = clock()
            side.run()
            seconds[side.name].append(clock() - started)
            side.clean_up()

    def before() -> None:
        if len(seconds[ours.name]) % 2 == 0:
            run_others()
        ours.prepare()

    def after() -> None:
        ours.clean_up()
        if len(seconds[ours.name]) % 2 == 0:
            run_others()

    benchmark.pedantic(run_ours, setup=before, teardown=after, rounds=rounds, warmup_rounds=1)
    mine = seconds[ours.name][1:]
    ratios = {}
    for side in others:
        pairs = zip(seconds[side.name][1:], mine, strict=True)
        ratios[side.name] = median(theirs / my_own for theirs, my_own in pairs)
    benchmark.extra_info["milliseconds"] = {
        name: round(median(t[1:]) * 1e3, 3) for name, t in seconds.items()
    }
    benchmark.extra_info["speed against"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    return ratios
