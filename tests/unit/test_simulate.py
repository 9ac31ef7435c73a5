"""Simulation: exact counts, sweeps, reference hit ratios, and the picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvstore.errors import ConfigError
from kvstore.policy import POLICIES, make_policy
from kvstore.simulate import Curve, plot, simulate, sweep
from kvstore.traces import read_references

INFINITE = 10**9


def lru_hits(references: list[int], capacity: int) -> int:
    """References whose key was among the last `capacity` distinct ones, found the slow way."""
    recent: list[int] = []
    hits = 0
    for key in references:
        if key in recent:
            hits += 1
            recent.remove(key)
        recent = [*recent, key][-capacity:]
    return hits


def test_lru_counts_are_exact() -> None:
    references = [int(Random(i).paretovariate(0.5)) % 60 for i in range(2000)]
    for capacity in (1, 7, 30, 100):
        curve = simulate(references, "lru", capacity)
        hits = lru_hits(references, capacity)
        assert curve == Curve("lru", capacity, 2000, hits, hits / 2000)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_only_first_references_miss(policy: str) -> None:
    references = ["a", "b", "a", "c", "b", "a"]
    assert simulate(iter(references), policy, 3) == Curve(policy, 3, 6, 3, 0.5)
    assert simulate([], policy, 3) == Curve(policy, 3, 0, 0, 0.0)


def test_sweep_goes_by_policy_then_capacity_over_one_reading() -> None:
    curves = sweep(iter([1, 2, 1, 3, 2, 1]), ["lru", "arc"], [3, 1])
    assert [(curve.policy, curve.capacity) for curve in curves] == [
        ("lru", 3),
        ("lru", 1),
        ("arc", 3),
        ("arc", 1),
    ]
    assert [curve.hits for curve in curves] == [3, 0, 3, 0]


def test_wrong_policy_and_capacity_are_refused_before_the_trace_is_read() -> None:
    def unread() -> Iterator[int]:
        pytest.fail("the trace was read")
        yield

    with pytest.raises(ConfigError, match="unknown policy 'ark'; did you mean 'arc'"):
        sweep(unread(), ["lru", "ark"], [10])
    with pytest.raises(ConfigError, match="at least 1 chunk, not 0"):
        sweep(unread(), ["lru"], [10, 0])
    with pytest.raises(ConfigError, match="did you mean 'lru'"):
        make_policy("LRU", 10)


def test_mooncake_with_an_infinite_cache(shared_data: Path) -> None:
    references = read_references(shared_data / "mooncake_conversation_first2000.jsonl")
    curve = simulate(references, "arc", INFINITE)
    assert 100 * curve.hit_ratio == pytest.approx(28.906, abs=0.0006)


def test_coding_agents_at_four_capacities(shared_data: Path) -> None:
    references = read_references(shared_data / "weka16_merged.jsonl.gz")
    curves = sweep(references, ["lru"], [INFINITE, 1000, 5000, 10_000])
    found = [100 * curve.hit_ratio for curve in curves]
    assert found == pytest.approx([92.24, 24.46, 83.89, 90.87], abs=0.006)


CURVES = [Curve("lru", 100, 9, 1, 0.1), Curve("arc", 1000, 9, 6, 0.6), Curve("arc", 100, 9, 3, 0.3)]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_plot_writes_the_format_of_its_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curves{suffix}"
    plot(iter(CURVES), path)
    assert path.read_bytes().startswith(magic)


def test_plot_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("curves.xls", "absent/curves.png"):
        with pytest.raises(ConfigError, match=f"cannot write the picture .*{name}"):
            plot(CURVES, tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[plot\]'"):
        plot(CURVES, tmp_path / "curves.png")
