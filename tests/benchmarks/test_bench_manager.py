"""vLLM's calls of the manager at 6,000 chunks a prompt, against vLLM's own manager of host memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from _paired import Side, compare
from pytest_benchmark.fixture import BenchmarkFixture

pytest.importorskip("vllm", reason="vLLM is not installed (tox -e vllm)")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvstore.opening import assemble
from kvstore.testing.faults import Fault, FaultPlan, Rule
from kvstore_vllm.acks import AckWords
from kvstore_vllm.config import parse
from kvstore_vllm.manager import GroupInfo, KVStoreManager
from kvstore_vllm.telemetry import Telemetry

CHUNKS = 6_000
SLOTS = 7_000  # every prompt evicts the one before
PAGE = 4096
TOKENS = 16
CALLS = ["prepare_store", "complete_store", "lookup", "prepare_load", "complete_load"]


class Life:
    """Requests on one manager, each of which makes all the calls, in order."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._calls: dict[str, Callable[[], object]] = {
            "prepare_store": lambda: manager.prepare_store(self.keys, self.context),
            "complete_store": lambda: manager.complete_store(self.unordered, self.context),
            "lookup": self._look_up_all,
            "prepare_load": lambda: manager.prepare_load(self.keys, self.context),
            "complete_load": lambda: manager.complete_load(self.unordered, self.context),
        }

    def side(self, name: str, timed: str) -> Side:
        """The call `timed`, with those before and after it around it."""
        place = CALLS.index(timed)

        def prepare() -> None:
            self._arrive()
            for call in CALLS[:place]:
                self._calls[call]()

        def clean_up() -> None:
            for call in CALLS[place + 1 :]:
                self._calls[call]()
            self.manager.on_request_finished(self.context)
            self.manager.on_schedule_end(ScheduleEndContext((), ()))

        return Side(name, self._calls[timed], prepare, clean_up)

    def _arrive(self) -> None:
        self.keys = make_keys()
        self.unordered = set(self.keys)
        self.context = make_context("request", self.keys)
        self.manager.on_new_request(self.context)

    def _look_up_all(self) -> None:
        lookup, context = self.manager.lookup, self.context
        for key in self.keys:
            assert lookup(key, context) is LookupResult.HIT


def make_keys() -> list[OffloadKey]:
    """Keys of a prompt that nobody has seen."""
    return [make_offload_key(os.urandom(32), 0) for _ in range(CHUNKS)]


def make_context(request: str, keys: list[OffloadKey]) -> ReqContext:
    """What vLLM tells of a request with these keys."""
    context = ReqContext(request)
    for place, key in enumerate(keys, 1):
        context.set_offload_key_position(key, place * TOKENS)
    return context


def make_manager(*tiers: str, factory: Any = None, slots: int = SLOTS, **options: Any) -> KVStoreManager:
    """A manager over host memory, and over `tiers`."""
    config = parse({"tiers": [f"ram://?capacity={slots * PAGE}&pin=off", *tiers], **options})
    made = {} if factory is None else {"factory": factory}
    store = assemble(config.store_options(PAGE, {"model": "benchmark"}), **made)
    acks = AckWords(store.arena.control, 1)
    return KVStoreManager(store, acks, config, [GroupInfo(0, TOKENS, None)], Telemetry(store.config))


@pytest.fixture
def manager() -> Iterator[KVStoreManager]:
    """Ours, over host memory alone."""
    manager = make_manager()
    yield manager
    manager.shutdown()


@pytest.mark.parametrize("call", CALLS)
def test_no_call_takes_longer_than_vllms_own(
    benchmark: BenchmarkFixture, manager: KVStoreManager, call: str
) -> None:
    ours = Life(manager).side("kvstore", call)
    theirs = Life(CPUOffloadingManager(num_chunks=SLOTS)).side("vllm", call)
    ratios = compare(benchmark, ours, theirs, clock=time.thread_time)
    assert ratios["vllm"] >= 1.0


@pytest.mark.parametrize("hangs", ["exists", "get"])
def test_a_deferred_request_costs_little(benchmark: BenchmarkFixture, tmp_path: Path, hangs: str) -> None:
    """Sixteen requests of which the tier does not answer; a step with all of them, its end included."""
    requests, steps, prompts = 16, 50, [make_keys()[:500] for _ in range(16)]
    options: dict[str, Any] = {"engine": "threads", "slots": 10_000, "lookup_timeout": "600s"}
    before = make_manager(f"file://{tmp_path}", **options | {"slots": 20_000})
    for number, keys in enumerate(prompts):
        context = make_context(f"{number}", keys)
        before.prepare_store(keys, context)
        before.complete_store(set(keys), context)
        before.store.flush(timeout=60)
    before.shutdown()
    plan = FaultPlan([Rule(Fault.HANG, hangs)])  # type: ignore[arg-type]
    manager = make_manager(f"file://{tmp_path}?timeout=600s", factory=plan, **options)
    contexts = [make_context(f"{number}", keys) for number, keys in enumerate(prompts)]

    def step() -> None:
        for keys, context in zip(prompts, contexts, strict=True):
            assert manager.lookup(keys[0], context) is LookupResult.RETRY
            assert manager.lookup(keys[1], context) is LookupResult.MISS
        manager.on_schedule_end(ScheduleEndContext((), ()))

    try:
        step()
        deadline = time.monotonic() + 30
        while hangs == "get" and not plan.log():
            assert time.monotonic() < deadline
            manager.store._engine.wait(0.1)  # its threads need the interpreter to get there
            step()

        seconds: list[float] = []

        def many() -> None:
            started = time.thread_time()
            for _ in range(steps):
                step()
            seconds.append(time.thread_time() - started)

        benchmark.pedantic(many, rounds=9, warmup_rounds=1)
        each = median(seconds) / (steps * requests)
        benchmark.extra_info["microseconds for a request and step"] = round(each * 1e6, 2)
        assert each <= 10e-6
    finally:
        plan.heal()
        manager.shutdown()
