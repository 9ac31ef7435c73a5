"""What vLLM is told of the store: metrics, and where hits come from."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import OffloadingHistogramMetadata
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvstore
from kvstore.events import Event
from kvstore.metrics import BUCKETS, Histogram, Latency
from kvstore.testing.backend import make_key
from kvstore_vllm.telemetry import (
    MANAGER_COUNTERS,
    SAMPLES,
    Telemetry,
    metric_definitions,
    source_of,
    tier_definitions,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "vllm-metrics.md"
KEYS = [make_key(number) for number in range(6)]
KINDS = {"OffloadingCounterMetadata": "counter", "OffloadingGaugeMetadata": "gauge"}


class Clock:
    """Seconds, as a test wants them."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_store(folder: Path) -> kvstore.Store:
    return kvstore.open(
        "ram://?capacity=256KiB&pin=off", f"file://{folder}/kv?name=disk", chunk_size="16KiB", engine="inline"
    )


def values(stats: Any) -> dict[str, dict[tuple[str, ...], Any]]:
    return dict(stats.data["data"])


def test_counters_are_what_has_happened_since_the_report_before(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config, clock=clock)
        totals = []
        for keys in (KEYS[:4], KEYS[4:]):
            store.put_many(dict.fromkeys(keys, b"x" * 100))
            store.flush()
            clock.now += 1
            stats = telemetry.stats(store.stats)
            totals.append(values(stats)["vllm:kvstore_tier_written_bytes"]["disk",])
        assert totals == [400, 200]
        clock.now += 1
        assert "vllm:kvstore_tier_written_bytes" not in values(telemetry.stats(store.stats))


def test_everything_that_is_reported_is_defined_with_its_labels(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config, clock=clock)
        store.put_many(dict.fromkeys(KEYS, b"x"))
        store.flush()
        assert store.get(make_key(100)) is None
        for name in MANAGER_COUNTERS:
            telemetry.count(name)
        stats = telemetry.stats(store.stats)
    defined = metric_definitions()
    for name, labelled in values(stats).items():
        assert {len(labels) for labels in labelled} == {len(defined[name].labelnames)}
    assert set(values(stats)["vllm:kvstore_tier_breaker"]) == {
        (tier, direction) for tier in ("host", "disk") for direction in ("read", "write")
    }
    assert (
        pickle.loads(pickle.dumps(stats)).reduce() == stats.reduce()
    )  # as it travels to vLLM's other process


def test_definitions_of_the_tiers_are_part_of_all() -> None:
    assert tier_definitions().items() <= metric_definitions().items()


def test_host_is_reported(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config, clock=clock)
        store.put_many(dict.fromkeys(KEYS[:3], b"x"))
        with store.read(KEYS[:2]), store.reserve([make_key(50)]):
            found = values(telemetry.stats(store.stats))
    assert found["vllm:kvstore_host_slots"][()] == 16
    assert found["vllm:kvstore_host_slots_used"][()] == 4
    assert found["vllm:kvstore_host_slots_leased"][()] == 2


def test_store_is_asked_four_times_a_second_at_most(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config, clock=clock)
        asked = 0

        def take() -> kvstore.Stats:
            nonlocal asked
            asked += 1
            return store.stats()

        for _ in range(1000):
            telemetry.stats(take)
            clock.now += 0.001
        assert 3 <= asked <= 5


def test_samples_of_a_histogram_are_bounded_and_none_is_lost(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config, clock=clock)
        keys = [make_key(7)]
        for _ in range(2 * SAMPLES + 10):
            store.lookup(keys)
        counts = []
        for _ in range(4):
            found = values(telemetry.stats(store.stats)).get("vllm:kvstore_tier_lookup_seconds", {})
            counts.append(len(found.get(("host",), ())))
            clock.now += 1
    assert counts == [SAMPLES, SAMPLES, 10, 0]


def test_samples_fall_into_the_buckets_of_what_was_observed(tmp_path: Path, clock: Clock) -> None:
    durations = [0.0, 1e-6, 3e-5, 9e-5, 0.0009, 0.02, 0.5, 9.9, 70.0, 1000.0]
    histogram = Histogram()
    for seconds in durations:
        histogram.observe(seconds)
    with open_store(tmp_path) as store:
        stats = store.stats()
        telemetry = Telemetry(store.config, clock=clock)
        stats.host.latency["load"] = Latency.of(histogram)  # type: ignore[index]
        samples = values(telemetry.stats(lambda: stats))["vllm:kvstore_tier_load_seconds"]["host",]
    definition = metric_definitions()["vllm:kvstore_tier_load_seconds"]
    bounds = definition.buckets
    assert [bisect_left(bounds, s) for s in samples] == [bisect_left(bounds, d) for d in durations]
    assert bounds == pytest.approx(BUCKETS[8::4], rel=0.01)


def test_breaker_is_a_number(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "kv").write_text("a file, where a directory should be")
    tier = {"url": f"file://{tmp_path}/kv", "name": "disk", "required": False}
    with kvstore.open("ram://?capacity=256KiB&pin=off", tier, chunk_size="16KiB") as store:
        found = values(Telemetry(store.config, clock=clock).stats(store.stats))["vllm:kvstore_tier_breaker"]
    assert (found["disk", "read"], found["host", "read"]) == (2, 0)


# Where hits come from.


def promoted(*keys: bytes, source: str = "disk") -> Event:
    return Event("promoted", keys, source, "host", "local")


def test_promotion_counts_for_the_request_that_asks_first(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config)
        store.put_many(dict.fromkeys(KEYS[:2], b"x"))
    with open_store(tmp_path) as store:
        assert store.prefetch(KEYS[:1]).result().promoted
        telemetry.note(store.events())
    assert telemetry.hit_source(KEYS[0], "first") is CacheHitSource.DISK
    assert telemetry.hit_source(KEYS[0], "second") is CacheHitSource.HOST
    assert telemetry.hit_source(KEYS[0], "first") is CacheHitSource.DISK
    assert telemetry.hit_source(KEYS[1], "first") is CacheHitSource.HOST


def test_chunk_that_left_the_host_has_no_origin(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config)
    telemetry.note([promoted(*KEYS[:2]), Event("removed", KEYS[:1], "host", None, "local")])
    telemetry.note([Event("removed", KEYS[1:2], "disk", None, "local")])  # the host still has that one
    assert telemetry.hit_source(KEYS[0], "r") is CacheHitSource.HOST
    assert telemetry.hit_source(KEYS[1], "r") is CacheHitSource.DISK


def test_unknown_tiers_are_unspecified_and_schemes_have_sources(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config)
    telemetry.note([promoted(KEYS[0], source="elsewhere")])
    assert telemetry.hit_source(KEYS[0], "r") is CacheHitSource.EXTERNAL_UNSPECIFIED
    sources = [source_of(scheme) for scheme in ("file", "s3", "peer")]
    assert sources == [CacheHitSource.DISK, CacheHitSource.DISK, CacheHitSource.P2P]


def test_origins_are_bounded(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        telemetry = Telemetry(store.config)
    keys = [number.to_bytes(16) for number in range(1 << 17)]
    for first in range(0, len(keys), 1 << 12):
        telemetry.note([promoted(*keys[first : first + (1 << 12)])])
    assert telemetry.hit_source(keys[-1], "r") is CacheHitSource.DISK
    assert telemetry.hit_source(keys[0], "r") is CacheHitSource.HOST


# Documentation.


def test_metrics_stand_on_their_page() -> None:
    lines = ["| Metric | Kind | Labels | Meaning |\n", "| --- | --- | --- | --- |\n"]
    for name, metric in metric_definitions().items():
        histogram = isinstance(metric, OffloadingHistogramMetadata)
        kind = "histogram" if histogram else KINDS[type(metric).__name__]
        shown = name + "_total" * (kind == "counter")
        labels = ", ".join(f"`{label}`" for label in metric.labelnames)
        lines.append(f"| `{shown}` | {kind} | {labels} | {metric.documentation} |\n")
    table = "".join(lines)
    assert table in PAGE.read_text(encoding="utf-8"), f"\n{table}"
