"""The Prometheus exporter, scraped as Prometheus does: over HTTP, read by its client's own parser."""

from __future__ import annotations

import gc
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.exporters.prometheus import MetricsServer, register, serve
from kvstore.metrics import BUCKETS, COUNTERS, HISTOGRAMS
from kvstore.opening import assemble
from kvstore.testing.backend import make_key

CHUNK = 4096
HOST_SLOTS = 4

#: Labels and value of each sample, by its name.
Samples = dict[str, list[tuple[dict[str, str], float]]]


def parse(text: str) -> Samples:
    found: Samples = {}
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names)), "a family may come only once"
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def scrape(server: MetricsServer) -> Samples:
    with urllib.request.urlopen(server.url, timeout=10) as response:
        assert response.status == 200
        return parse(response.read().decode())


def samples_of(registry: CollectorRegistry) -> Samples:
    return parse(generate_latest(registry).decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    """The one sample with these labels (and perhaps others)."""
    (found,) = (number for mine, number in samples[name] if labels.items() <= mine.items())
    return found


def open_store(folder: Path, *, engine: str = "inline", model: str = "m", host: str = "ram") -> kvstore.Store:
    return kvstore.open(
        {"url": f"ram://?capacity={HOST_SLOTS * CHUNK}&pin=off", "name": host},
        {"url": f"file://{folder}", "name": "disk"},
        namespace={"model": model},
        chunk_size=CHUNK,
        engine=engine,
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with open_store(tmp_path) as store:
        yield store


def test_a_scrape_over_http_shows_what_happened(store: kvstore.Store) -> None:
    keys = [make_key(i) for i in range(HOST_SLOTS + 2)]
    for key in keys:
        store.put(key, key)
    assert store.get(keys[0]) == keys[0]  # evicted by then: comes from the disk
    assert store.get(make_key(99)) is None
    with serve(store, 0) as server, store.read([keys[0]]):
        samples = scrape(server)
    disk = {"namespace": store.namespace.directory, "tier": "disk", "scheme": "file"}
    host = {"namespace": store.namespace.directory, "tier": "ram", "scheme": "ram"}
    assert value(samples, "kvstore_host_slots") == HOST_SLOTS
    assert value(samples, "kvstore_host_fill_ratio") == 1.0
    assert value(samples, "kvstore_host_leased") == 1
    assert value(samples, "kvstore_host_promoting") == value(samples, "kvstore_host_quarantined") == 0
    assert value(samples, "kvstore_writes_total", **disk) == len(keys)
    assert value(samples, "kvstore_read_bytes_total", **disk) == len(keys[0])
    assert value(samples, "kvstore_evictions_total", **host) == 3
    assert value(samples, "kvstore_load_seconds_count", **disk) == 1
    assert value(samples, "kvstore_store_seconds_count", **disk) == len(keys)
    assert value(samples, "kvstore_tier_chunks", **disk) == len(keys)
    assert value(samples, "kvstore_breaker_state", direction="read", state="closed", **disk) == 1
    assert value(samples, "kvstore_breaker_state", direction="write", state="open", **disk) == 0
    assert value(samples, "kvstore_events_dropped_total") == 0


def test_every_definition_is_exported_and_equals_the_snapshot(store: kvstore.Store) -> None:
    registry = CollectorRegistry()
    register(store, registry)
    store.put(make_key(1), b"one")
    stats, samples = store.stats(), samples_of(registry)
    for tier in stats:
        for name in COUNTERS:
            assert value(samples, f"kvstore_{name}_total", tier=tier.name) == tier.counters[name]
        for name in HISTOGRAMS:
            base, latency = f"kvstore_{name}_seconds", tier.latency[name]
            assert value(samples, f"{base}_count", tier=tier.name) == latency.count
            assert value(samples, f"{base}_sum", tier=tier.name) == latency.total
            buckets = [
                (labels["le"], n) for labels, n in samples[f"{base}_bucket"] if labels["tier"] == tier.name
            ]
            assert [float(bound) for bound, _ in buckets] == [*BUCKETS, float("inf")]
            steps = [n for _, n in buckets]
            assert [b - a for a, b in zip([0.0, *steps], steps, strict=False)] == list(latency.buckets)


def test_a_backend_exports_its_own_metrics(tmp_path: Path) -> None:
    from kvstore.backends import create

    config = open_store(tmp_path)
    config.close()

    def counting(tier: kvstore.config.TierConfig, namespace: kvstore.Namespace) -> kvstore.backends.Backend:
        backend = create(tier, namespace)
        backend.counters["part-uploads"] = 3.0
        return backend

    registry = CollectorRegistry()
    with assemble(config.config, counting) as store:
        register(store, registry)
        store.put(make_key(1), b"one")
        store.flush()
        samples = samples_of(registry)
    assert value(samples, "kvstore_backend_part_uploads_total", tier="disk") == 3


def test_stores_of_one_registry_share_the_families(tmp_path: Path, store: kvstore.Store) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with open_store(tmp_path, model="other") as other:
        end = register(store, registry)
        register(other, registry)
        spaces = [labels["namespace"] for labels, _ in samples_of(registry)["kvstore_host_slots"]]
        assert spaces == [store.namespace.directory, other.namespace.directory]
        end()
        end()
        assert len(samples_of(registry)["kvstore_host_slots"]) == 1


def test_series_of_the_same_name_are_refused(tmp_path: Path, store: kvstore.Store) -> None:
    registry = CollectorRegistry()
    register(store, registry)
    with open_store(tmp_path) as twin, pytest.raises(ValueError, match=r"'disk'.*exported already"):
        register(twin, registry)


def test_names_that_others_use_are_refused(store: kvstore.Store) -> None:
    registry = CollectorRegistry()
    Gauge("kvstore_host_slots", "somebody else's", registry=registry)
    with pytest.raises(ValueError, match="kvstore_host_slots"):
        register(store, registry)


def test_a_closed_store_is_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with serve(store, 0) as server:
        assert "kvstore_host_slots" in scrape(server)
        store.close()
        assert scrape(server) == {}
    with pytest.raises(kvstore.ClosedError):
        register(store, CollectorRegistry())


def test_the_exporter_keeps_no_store_alive(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    store = open_store(tmp_path)
    register(store, registry)
    del store
    gc.collect()
    assert samples_of(registry) == {}


def test_a_scrape_never_evicts(tmp_path: Path) -> None:
    """What a caller has seen as HIT stays until that caller acts, whoever scrapes in between."""
    wanted = make_key(100)
    with open_store(tmp_path) as store:
        store.put(wanted, b"on disk")
    keys = [make_key(i) for i in range(HOST_SLOTS)]
    with open_store(tmp_path, engine="threads") as store, serve(store, 0) as server:
        for key in keys:
            store.put(key, key)
        assert store.flush()
        job = store.prefetch([wanted])
        while not value(scrape(server), "kvstore_lookup_seconds_count", tier="disk"):
            pass  # until the tier has said that it has the chunk, which then wants a slot
        samples = scrape(server)
        assert value(samples, "kvstore_host_fill_ratio") == 1.0
        assert value(samples, "kvstore_evictions_total", tier="ram") == 0
        assert job.result(timeout=10).promoted == (wanted,)
        assert value(scrape(server), "kvstore_evictions_total", tier="ram") == 1


def test_scrapes_during_traffic(tmp_path: Path) -> None:
    with open_store(tmp_path, engine="threads") as store, serve(store, 0) as server:
        over = threading.Event()

        def write() -> None:
            for i in range(200):
                store.put(make_key(i), make_key(i))
            over.set()

        writer = threading.Thread(target=write)
        writer.start()
        counts = [value(scrape(server), "kvstore_writes_total", tier="ram")]
        while not over.is_set():
            counts.append(value(scrape(server), "kvstore_writes_total", tier="ram"))
        writer.join()
        assert counts == sorted(counts)
        assert value(scrape(server), "kvstore_writes_total", tier="ram") == 200


def test_the_port_is_free_again_after_close(store: kvstore.Store) -> None:
    server = serve(store, 0)
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    server.close()
    server.close()
    with serve(store, port) as again:
        assert "kvstore_host_slots" in scrape(again)
