"""A store whose storage fails on demand, used as an engine uses it: only calls that never wait."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvstore import Store
from kvstore.backends import create
from kvstore.catalog import SlotState
from kvstore.config import StoreConfig, TierConfig, parse
from kvstore.engine.processes import ProcessesEngine
from kvstore.events import Event
from kvstore.namespace import Namespace
from kvstore.opening import assemble
from kvstore.scan import Status, scan, spaces
from kvstore.testing.backend import make_key
from kvstore.testing.faults import FaultPlan, Rule

__all__ = [
    "CHUNK",
    "KEYS",
    "Clock",
    "World",
    "is_idle",
    "is_staffed",
    "kinds",
    "load",
    "save",
    "value",
    "wait_for",
]

CHUNK = 16 * 1024
KEYS = [make_key(number) for number in range(16)]
"""As many as the host tier holds with room to spare."""
_SLOTS = 32


def value(key: bytes) -> bytes:
    """The only right content of a chunk."""
    return key * (CHUNK // len(key))


class Clock:
    """Monotonic seconds, which a test can move on."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        """Let time pass; only sensible while nothing is in flight."""
        self._ahead += seconds


class World:
    """Two directories, ``first`` and ``second``, and a store over them; the faults are those of ``first``.

    Parameters
    ----------
    folder : Path
    engine : str
    """

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        self.engine = engine
        self.clock = Clock()
        self.plan = FaultPlan([])
        self.store: Store | None = None

    def config(self, **options: Any) -> StoreConfig:
        """Configuration, with more options for the first tier."""
        usual = {"workers": 1, "retries": 0}
        first = {"url": f"file://{self.folder}/first", "name": "first", **usual, **options}
        second = {"url": f"file://{self.folder}/second", "name": "second", **usual}
        host = f"ram://?capacity={_SLOTS * CHUNK}B&pin=off"
        return parse(host, first, second, chunk_size=CHUNK, engine=self.engine)

    def open(self, *rules: Rule, **options: Any) -> Store:
        """Open the store; `rules` and `options` are for the first tier."""
        self.plan = FaultPlan([msgspec.structs.replace(rule, tier="first") for rule in rules])
        self.store = assemble(self.config(**options), self.plan, clock=self.clock)
        return self.store

    def plant(self, keys: Iterable[bytes], *tiers: str) -> None:
        """Put chunks into tiers, past the store."""
        keys = list(keys)
        for tier in self._tiers(tiers or ("first", "second")):
            backend = create(tier, self.namespace)
            backend.open()
            for key in keys:
                assert backend.write(key, memoryview(value(key)))

    def found(self, tier: str) -> dict[Status, int]:
        """What the scanner finds in a tier: how many files of each status."""
        (config,) = self._tiers([tier])
        counts: dict[Status, int] = {}
        for space in spaces(config):
            for finding in scan(space, stale_after=0.0):
                counts[finding.status] = counts.get(finding.status, 0) + 1
        return counts

    def close(self) -> None:
        """End the faults and the store, and prove that nothing is lost: no slot, no lease."""
        if self.store is None:
            return
        store, self.store = self.store, None
        self.plan.heal()
        wait_for(lambda: is_idle(store))
        store._catalog.audit()
        assert {store._catalog.state(slot) for slot in range(_SLOTS)} <= {SlotState.FREE, SlotState.READY}
        assert store.close(timeout=20)

    @property
    def namespace(self) -> Namespace:
        """That of the store."""
        config = self.config()
        return Namespace(config.namespace, config.chunk_size)

    def _tiers(self, names: Iterable[str]) -> Iterator[TierConfig]:
        return (tier for tier in self.config().tiers if tier.name in names)


def is_idle(store: Store) -> bool:
    """Whether nothing is in flight, leased, being filled or set aside."""
    store.poll()
    stats = store.stats()
    queued = sum(tier.queued for tier in stats)
    return not (store.busy or queued or stats.leased or stats.promoting or stats.quarantined)


def is_staffed(store: Store) -> bool:
    """Whether every worker process that was killed has been replaced by one that is ready."""
    if not isinstance(store._engine, ProcessesEngine):
        return True
    store.poll()
    workers = store._engine._workers.values()
    return all(worker.opened and not worker.lost for worker in workers) and len(workers) == sum(
        tier.workers for tier in store.config.tiers
    )


def load(store: Store, keys: Iterable[bytes]) -> set[bytes]:
    """Look up, prefetch, poll until it is done, read; returns the keys that came, each byte right."""
    keys = list(keys)
    store.lookup(keys)
    job = store.prefetch(keys)
    wait_for(job.done, store)
    outcome = job.result(timeout=0)
    store.lookup(keys)
    with store.read(keys) as lease:
        for key, view in lease.items():
            assert view == value(key), "a wrong byte"
        assert set(lease) == set(outcome.promoted) | set(outcome.skipped)
        return set(lease)


def save(store: Store, keys: Iterable[bytes]) -> set[bytes]:
    """Reserve, fill, commit; returns the keys that got a slot."""
    with store.reserve(list(keys)) as lease:
        for key, view in lease.items():
            view[:] = value(key)
        return set(lease)


def wait_for(condition: Callable[[], bool], store: Store | None = None, timeout: float = 20.0) -> None:
    """Return when it has come to pass; with a store, look whenever that has something to report."""
    deadline = time.monotonic() + timeout
    poller = select.poll()
    if store is not None:
        poller.register(store.fileno(), select.POLLIN)
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        poller.poll(5)


def kinds(events: Iterable[Event], source: str) -> dict[str, int]:
    """How many keys (or changes of a tier's state) the events of each kind are about."""
    counts: dict[str, int] = {}
    for event in events:
        if event.source == source:
            counts[event.kind] = counts.get(event.kind, 0) + max(1, len(event.keys))
    return counts
