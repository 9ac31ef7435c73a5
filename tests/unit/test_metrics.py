"""Counters, histograms, and the snapshot that users see."""

from __future__ import annotations

import json
from bisect import bisect_left

import pytest

from kvstore.errors import ConfigError
from kvstore.metrics import BUCKETS, COUNTERS, HISTOGRAMS, Histogram, Latency, Stats, TierCounters, TierStats


def make_stats() -> Stats:
    counters = TierCounters(hits=3)
    counters.add("misses", 2)
    counters.histograms["load"].observe(0.5)
    latency = {name: Latency.of(histogram) for name, histogram in counters.histograms.items()}
    tiers = tuple(
        TierStats(name, "file", 1, 10, None, counters.snapshot(), latency) for name in ("host", "disk")
    )
    return Stats(
        tiers=tiers,
        slots=4,
        fill=0.25,
        leased=0,
        promoting=0,
        quarantined=0,
        pinned=False,
        namespace="00",
        events_dropped=0,
    )


def test_buckets_are_eight_to_a_decade() -> None:
    assert BUCKETS[0] == pytest.approx(1e-6) and BUCKETS[-1] == pytest.approx(100.0)
    assert len(BUCKETS) == 8 * 8 + 1


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantile_is_the_bucket_bound_above_the_sorted_value(q: float) -> None:
    values = sorted(1e-6 * 1.17**n for n in range(100))
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    true = values[int(q * len(values)) - 1]
    assert histogram.quantile(q) == BUCKETS[bisect_left(BUCKETS, true)]


def test_quantile_at_the_ends() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.99) == 0.0
    histogram.observe(1e9)
    assert histogram.quantile(0.5) == BUCKETS[-1]
    assert histogram.total == 1e9


def test_latency_summarizes() -> None:
    histogram = Histogram()
    for _ in range(4):
        histogram.observe(0.25)
    latency = Latency.of(histogram)
    assert (latency.count, latency.total) == (4, 1.0)
    assert latency.p50 == latency.p99 >= 0.25
    assert sum(latency.buckets) == 4 and len(latency.buckets) == len(BUCKETS) + 1


def test_every_counter_and_histogram_has_a_meaning() -> None:
    assert set(TierCounters().snapshot()) == set(COUNTERS)
    assert set(TierCounters().histograms) == set(HISTOGRAMS)
    assert all(meaning and meaning[0].islower() for meaning in (*COUNTERS.values(), *HISTOGRAMS.values()))


def test_stats_by_name() -> None:
    stats = make_stats()
    assert stats.host is stats.tiers[0]
    assert stats.tier("disk") is stats.tiers[1]
    assert [tier.name for tier in stats] == ["host", "disk"]
    with pytest.raises(ConfigError, match="no tier 'dsk'; did you mean 'disk'"):
        stats.tier("dsk")


def test_counters_read_as_attributes() -> None:
    host = make_stats().host
    assert (host.hits, host.misses, host.evictions) == (3, 2, 0)
    with pytest.raises(AttributeError):
        _ = host.hitz


def test_stats_as_plain_data() -> None:
    plain = json.loads(json.dumps(make_stats().to_dict()))
    assert plain["slots"] == 4
    assert plain["tiers"][1]["counters"]["misses"] == 2
    assert plain["tiers"][0]["latency"]["load"]["count"] == 1
