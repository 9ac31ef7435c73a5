"""Simulation against a bare OrderedDict loop over the same references, in one run.

Both sides are timed in turns, so that a change of the machine's speed meets both; the figure is the median
of the ratios of their times.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from statistics import median
from time import process_time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvstore.simulate import simulate
from kvstore.traces import read_references

ROUNDS = 7
LEAST = {"lru": 0.35, "arc": 0.2}


@pytest.fixture(scope="module")
def references(shared_data: Path) -> list[object]:
    return list(read_references(shared_data / "oltp_u32le.xz"))


def bare(references: list[object], capacity: int) -> int:
    """Hits of an LRU cache in the fewest steps that Python has for one."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for key in references:
        if key in cache:
            cache.move_to_end(key)
            hits += 1
        else:
            if len(cache) >= capacity:
                cache.popitem(last=False)
            cache[key] = None
    return hits


def paired_ratios(references: list[object], policy: str, capacity: int) -> list[float]:
    """Time of the bare loop over time of the simulation, round by round."""
    ratios = []
    for _ in range(ROUNDS):
        start = process_time()
        hits = bare(references, capacity)
        middle = process_time()
        curve = simulate(references, policy, capacity)
        end = process_time()
        assert policy != "lru" or curve.hits == hits
        ratios.append((middle - start) / (end - middle))
    return ratios


@pytest.mark.parametrize("capacity", [1000, 5000])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_simulation_against_a_bare_loop(
    benchmark: BenchmarkFixture, references: list[object], policy: str, capacity: int
) -> None:
    ratios = benchmark.pedantic(paired_ratios, (references, policy, capacity), rounds=1)
    benchmark.extra_info |= {"references": len(references), "ratios": ratios, "median": median(ratios)}
    assert median(ratios) >= LEAST[policy]
