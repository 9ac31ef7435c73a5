"""``KVStoreTier`` below vLLM's own tiering manager: real storage, real workers, no engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tiered_host import ROW, Host, content, make_key
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingHistogramMetadata,
    OffloadKey,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.backends import create
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.testing.faults import Fault, FaultPlan, Rule

HIT, MISS = LookupResult.HIT, LookupResult.MISS
KEYS = [make_key(number) for number in range(4)]


def entry(folder: Path, **options: Any) -> dict[str, Any]:
    """A tier in a directory, shared by all who name it so."""
    usual = {"engine": "threads", "namespace": {"weights": "w"}, "name": "disk"}
    return {"url": f"file://{folder}/kv", **usual, **options}


def faulty(folder: Path, plan: FaultPlan, **options: Any) -> dict[str, Any]:
    """The same, where the faults of a plan come true."""
    usual = {"url": f"fault::file://{folder}/kv", "storage_options": {"fault": plan.options}, "retries": 0}
    return entry(folder, **usual, **options)


def files(folder: Path) -> dict[str, Path]:
    """Objects by the hex digits of their keys."""
    return {path.stem: path for path in folder.glob("kv/*/*/*.kv")}


def is_right(host: Host, keys: Sequence[OffloadKey]) -> bool:
    return all(host.read(key) == content(key) for key in keys)


def counters(host: Host) -> dict[str, int]:
    return dict(host.tier._mover.stats().counters)


def test_vllm_asks_of_a_tier_what_it_always_did() -> None:
    asked = {"drain_jobs", "get_finished_jobs", "lookup", "on_new_request", "submit_load", "submit_store"}
    assert SecondaryTierManager.__abstractmethods__ == asked


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_what_left_the_host_comes_back(tmp_path: Path, engine: str) -> None:
    with Host(entry(tmp_path, engine=engine)) as host:
        host.store(KEYS)
        host.settle()
        host.forget()
        assert [host.manager.primary_tier.lookup(key, host.request()) for key in KEYS] == [MISS] * 4
        assert host.look_up([*KEYS, make_key(99)]) == [HIT] * 4 + [MISS]
        assert is_right(host, KEYS)
    with Host(entry(tmp_path, engine=engine)) as host:
        assert host.look_up(KEYS) == [HIT] * 4
        assert is_right(host, KEYS)


def test_object_is_the_row_with_a_header(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        host.store(KEYS[:1])
        host.settle()
    (path,) = files(tmp_path).values()
    assert path.stem == KEYS[0].hex()
    assert path.read_bytes()[4096:] == content(KEYS[0])


def test_corrupted_and_deleted_objects_are_misses_and_the_rest_of_the_job_is_kept(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        host.store(KEYS)
        host.settle()
        found = files(tmp_path)
        with found[KEYS[1].hex()].open("r+b") as file:
            file.seek(4096 + 100)
            file.write(b"\xff\x00\xff")
        found[KEYS[2].hex()].unlink()
        host.forget()
        assert host.look_up(KEYS) == [HIT, MISS, MISS, HIT]
        assert is_right(host, [KEYS[0], KEYS[3]])
        assert counters(host)["corrupt"] == 1
        assert len(list(tmp_path.glob("kv/*/quarantine/*"))) == 1


def test_object_shorter_than_a_row_is_a_miss(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        tier = host.tier._mover._tier.config
        (manifest,) = Path(tier.path).glob("*/namespace.json")
        with closing(create(tier, Namespace.from_manifest(manifest.read_bytes()))) as backend:
            backend.open()
            assert backend.write(KEYS[0], memoryview(b"half a row"))
        assert host.look_up(KEYS[:1]) == [MISS]
        assert counters(host)["corrupt"] == 1


def test_reads_that_hang_end_at_their_deadline_and_cost_the_engine_nothing(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        host.store(KEYS)
        host.settle()
    plan = FaultPlan([Rule(Fault.HANG, "get")])
    with Host(faulty(tmp_path, plan, engine="processes", timeout="2s")) as host:
        pids = set(host.tier._mover._engine.pids)
        assert host.look_up(KEYS) == [MISS] * 4
        assert not host.manager.has_pending_work()  # so the rows are vLLM's again
        assert pids - set(host.tier._mover._engine.pids)  # whoever hung is gone
        assert host.slowest < 0.25
        assert counters(host)["timeouts"] >= 1
        host.forget()  # vLLM fills all rows with something else
        plan.heal()
        rows = [bytes(host.row(number)) for number in range(8)]
        host.until(lambda: host.tier.lookup(KEYS[0], host.request()) is not LookupResult.RETRY)
        assert [bytes(host.row(number)) for number in range(8)] == rows


def test_thread_that_hangs_keeps_its_rows_until_it_answers(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        host.store(KEYS[:1])
        host.settle()
    plan = FaultPlan([Rule(Fault.HANG, "get", times=1)])
    with Host(faulty(tmp_path, plan, timeout="100ms")) as host:
        context = host.request()
        pending = LookupResult.HIT_PENDING
        host.until(lambda: host.manager.lookup(KEYS[0], context) is pending)
        host.until(lambda: counters(host)["timeouts"] > 0)
        assert host.manager.lookup(KEYS[0], context) is pending
        assert host.manager.has_pending_work()
        plan.heal()
        assert host.look_up(KEYS[:1]) == [HIT]  # what it reads in the end is as good as ever
        assert is_right(host, KEYS[:1])


def test_writes_that_hang_pin_half_of_the_host_and_no_more(tmp_path: Path) -> None:
    Host(entry(tmp_path)).manager.shutdown()  # makes the namespace
    plan = FaultPlan([Rule(Fault.HANG, "put")])
    with Host(faulty(tmp_path, plan, engine="processes", timeout="2s", workers=1), rows=8) as host:
        for number in range(6):
            host.store([make_key(number)])
        assert counters(host)["dropped"] == 2
        host.settle()
        assert counters(host)["timeouts"] >= 1
        assert host.slowest < 0.25
        assert not files(tmp_path)
        plan.heal()


def test_job_that_is_larger_than_half_of_the_host_is_not_cut_short(tmp_path: Path) -> None:
    with Host(entry(tmp_path), rows=8) as host:
        host.store([make_key(number) for number in range(8)])
        host.settle()
        assert len(files(tmp_path)) == 8


def test_tier_that_cannot_be_reached_is_all_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kv").write_text("a file, where a directory should be")
    with Host(entry(tmp_path)) as host:
        host.store(KEYS)
        host.settle()
        host.forget()
        assert host.look_up(KEYS) == [MISS] * 4
        assert counters(host)["dropped"] == 4
    assert "is down, going on without it" in caplog.text
    with pytest.raises(Exception, match="cannot be opened"):
        Host(entry(tmp_path, required=True))


# Who may read what.


def test_without_a_namespace_nothing_outlives_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Host(entry(tmp_path, namespace=None)) as host:
        host.store(KEYS)
        host.settle()
        host.forget()
        assert host.look_up(KEYS) == [HIT] * 4
    assert "found by this run only" in caplog.text
    with Host(entry(tmp_path, namespace=None)) as host:
        assert host.look_up(KEYS) == [MISS] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other/model"},
        {"dtype": "float16"},
        {"tp_size": 2},
        {"layer_names": ("layers.0", "layers.2")},
        {"canonical_layout": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_rows_of_another_kind_are_not_found(tmp_path: Path, change: dict[str, Any]) -> None:
    with Host(entry(tmp_path)) as host:
        host.store(KEYS)
        host.settle()
    with Host(entry(tmp_path), **change) as host:
        assert host.look_up(KEYS) == [MISS] * 4


def test_rows_in_the_canonical_layout_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    with Host(entry(tmp_path), canonical_layout=True) as host:
        host.store(KEYS)
        host.settle()
    with Host(entry(tmp_path), canonical_layout=True, tp_size=2) as host:
        assert host.look_up(KEYS) == [HIT] * 4
    with Host(entry(tmp_path), canonical_layout=True, tp_size=2, is_parallelism_agnostic=False) as host:
        assert host.look_up(KEYS) == [MISS] * 4


@pytest.mark.parametrize(("on_reset", "answer"), [("rekey", MISS), ("keep", HIT)])
def test_after_a_reset_the_weights_may_be_others(tmp_path: Path, on_reset: str, answer: LookupResult) -> None:
    with Host(entry(tmp_path, on_reset=on_reset)) as host:
        host.store(KEYS)  # under way, when the reset comes
        host.manager.reset_cache()
        assert not host.manager.has_pending_work()
        assert host.look_up(KEYS) == [answer] * 4
        host.store(KEYS)
        host.settle()
        host.forget()
        assert host.look_up(KEYS) == [HIT] * 4
        assert is_right(host, KEYS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": None}, "url"),
        ({"write": "on-evict"}, "on-evict"),
        ({"capasity": "1GiB"}, "capacity"),
        ({"namespace": "text"}, "mapping"),
        ({"engine": "fibres"}, "engine"),
        ({"url": "ram://?capacity=1GiB"}, "ram://"),
        ({"secret_key": "x"}, "credential"),
    ],
)
def test_wrong_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(entry(tmp_path, **options))


# Room, pressure.


def test_tier_with_a_capacity_makes_room(tmp_path: Path) -> None:
    room = 4 * (ROW + 4096)
    with Host({"url": f"memory://{tmp_path.name}", "capacity": room, "engine": "threads"}) as host:
        for first in (0, 4, 8):
            host.store([make_key(number) for number in range(first, first + 4)])
            host.settle()
            host.forget()
        found = host.look_up([make_key(number) for number in range(12)])
        assert found.count(HIT) == 4
        assert host.tier._mover.stats().bytes <= room
        assert counters(host)["evictions"] == 8


def test_pressure_is_reported_to_the_detector_which_then_refuses_stores(tmp_path: Path) -> None:
    detector = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "warmup_completions": 1,
        "high_water_s": 1e-9,
        "low_water_s": 1e-10,
    }
    with Host(entry(tmp_path, backpressure=detector)) as host:
        for number in range(3):
            host.store([make_key(number)])
            host.settle()
        assert host.tier.bp_detector.is_under_pressure()
        assert sorted(files(tmp_path)) == sorted(make_key(number).hex() for number in range(2))


# What vLLM shows to others.


def events_of(host: Host) -> list[OffloadingEvent]:
    return [event for event in host.manager.take_events() if event.medium is Medium.STORAGE]


def test_events_tell_what_the_tier_holds(tmp_path: Path) -> None:
    with Host(entry(tmp_path, enable_kv_events=True, locality="REMOTE"), events=True) as host:
        host.store(KEYS)
        host.settle()
        (event,) = events_of(host)
        assert (sorted(event.keys), event.removed) == (sorted(KEYS), False)
        assert (event.locality, event.ownership) == (Locality.REMOTE, "disk")
        host.manager.reset_cache()
        host.store(KEYS[:1])
        host.settle()
        (event,) = events_of(host)
        assert (event.keys, event.removed) == (KEYS[:1], False)  # without the epoch
        (path,) = (path for name, path in files(tmp_path).items() if len(name) > 2 * len(KEYS[0]))
        path.write_bytes(b"not an object")
        host.forget()
        assert host.look_up(KEYS[:1]) == [MISS]
        (event,) = events_of(host)
        assert (event.keys, event.removed) == (KEYS[:1], True)


@pytest.mark.parametrize(("wanted", "published"), [(False, True), (True, False)])
def test_no_events_unless_both_ask_for_them(tmp_path: Path, wanted: bool, published: bool) -> None:
    with Host(entry(tmp_path, enable_kv_events=wanted), events=published) as host:
        host.store(KEYS)
        host.settle()
        assert not events_of(host)


def test_locality_is_that_of_the_scheme_unless_configured(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        assert host.tier.locality is Locality.LOCAL


def test_everything_that_is_reported_is_defined(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        host.store(KEYS)
        host.settle()
        host.forget()
        assert host.look_up([*KEYS, make_key(77)]) == [HIT] * 4 + [MISS]
        defined = TieringOffloadingSpec.build_metric_definitions(host.spec.extra_config)
        stats = host.manager.get_stats()
    ours = {name: values for name, values in stats.data["data"].items() if "kvstore" in name}
    assert {name: values for name, values in ours.items() if name not in defined} == {}
    for name, values in ours.items():
        assert {len(labels) for labels in values} == {len(defined[name].labelnames)}
    assert ours["vllm:kvstore_tier_hits"] == {("disk",): 4}
    assert ours["vllm:kvstore_tier_misses"] == {("disk",): 1}
    assert ours["vllm:kvstore_tier_read_bytes"] == {("disk",): 4 * ROW}
    assert len(ours["vllm:kvstore_tier_store_seconds"]["disk",]) == 4
    assert isinstance(defined["vllm:kvstore_tier_store_seconds"], OffloadingHistogramMetadata)


def test_chunks_that_were_promoted_count_as_disk_hits(tmp_path: Path) -> None:
    with Host(entry(tmp_path)) as host:
        host.store(KEYS)
        host.settle()
        host.forget()
        context = host.request()
        assert host.look_up(KEYS, context) == [HIT] * 4
        assert {host.manager.get_load_source(key, context).value for key in KEYS} == {"disk"}


def test_warnings_are_few(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvstore_vllm"), Host(entry(tmp_path)):
        assert not [record for record in caplog.records if record.name.startswith("kvstore")]
