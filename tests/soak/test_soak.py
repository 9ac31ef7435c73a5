"""Everything at once: callers, faults from a printed seed, an intruder in the storage; then an audit.

``KVSTORE_SOAK_SECONDS`` is the length of each run (the short default is for every test run, ``tox -e soak``
takes minutes); ``KVSTORE_SOAK_SEED`` repeats one.
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path

import pytest

import kvstore
from kvstore.opening import assemble
from kvstore.scan import Status, scan, spaces
from kvstore.testing.faults import Fault, FaultPlan, Rule
from soak.actors import CHUNK, Book, Caller, Intruder
from support.processes import Footprint, wait_for

SECONDS = float(os.environ.get("KVSTORE_SOAK_SECONDS", "6"))
SLOTS = 32

#: Verbs of the backend that each fault can happen to.
WHERE = {
    Fault.EIO: ["get", "put", "exists", "delete"],
    Fault.EMFILE: ["get", "put", "exists"],
    Fault.EACCES: ["get", "put", "delete"],
    Fault.ENOSPC: ["put"],
    Fault.SHORT_READ: ["get"],
    Fault.SHORT_WRITE: ["put"],
    Fault.FLIPPED_BIT: ["get", "put"],
    Fault.TORN: ["put"],
    Fault.VANISH: ["get"],
    Fault.DELAY: ["get", "put", "exists"],
    Fault.HANG: ["get", "put", "exists", "delete"],
}


def make_rules(rng: random.Random, engine: str) -> list[Rule]:
    """Faults of all kinds, spread over the run, one of each early, for a machine may be slow; hangs are few,
    for each costs a worker."""
    rules = []
    for fault, verbs in WHERE.items():
        rare = fault is Fault.HANG
        for number in range(2 if rare else 6):
            skip = rng.randrange(int(200 * SECONDS) if number else 10)
            times = 1 if rare else rng.randrange(1, 12)
            rules.append(Rule(fault, rng.choice(verbs), skip=skip, times=times, seconds=0.02))
    if engine == "processes":
        rules += [
            Rule(Fault.KILL_WORKER, "put", tier="near", skip=rng.randrange(500), times=1, step=step)
            for step in (2, 5)
        ]
    return rules


def make_config(engine: str, policy: str, root: Path, seed: int) -> kvstore.StoreConfig:
    common = "timeout=300ms&retries=1"
    return kvstore.StoreConfig.from_dict(
        {
            "chunk_size": CHUNK,
            "engine": engine,
            "tiers": [
                f"ram://?capacity={SLOTS * CHUNK}&policy={policy}",
                f"file://{root}/near?capacity={100 * (CHUNK + 4096)}&{common}",
                f"memory://soak-{seed}?write=on-evict&{common}",
                f"file://{root}/far?{common}&durability=data",
            ],
        }
    )


@pytest.mark.timeout(SECONDS * 4 + 120)
@pytest.mark.parametrize(("engine", "policy"), [("threads", "arc"), ("processes", "lru")])
def test_soak(engine: str, policy: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("KVSTORE_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
    print(f"soak: KVSTORE_SOAK_SEED={seed}")
    rng = random.Random(seed)
    before = Footprint.now()
    plan = FaultPlan(make_rules(rng, engine), tmp_path / "plan")
    store = assemble(make_config(engine, policy, tmp_path, seed), plan)
    end = time.monotonic() + SECONDS
    book = Book(seed)
    callers = [Caller(store, book, rng.randrange(1 << 30), end) for _ in range(4)]
    intruder = Intruder(store, tmp_path / "far", rng.randrange(1 << 30), end)
    for actor in (*callers, intruder):
        actor.start()
    for actor in (*callers, intruder):
        actor.join()
    plan.heal()
    for actor in (*callers, intruder):
        assert actor.failure is None, repr(actor.failure)
    assert not [lie for caller in callers for lie in caller.lies]
    assert min(caller.calls for caller in callers) > 0
    assert {injection.fault for injection in plan.log()} >= {Fault.EIO, Fault.FLIPPED_BIT}
    assert intruder.deeds > 0
    audit(store)
    assert store.close(30)
    audit_storage(tmp_path)
    del store, plan, callers, intruder
    gc.collect()
    wait_for(lambda: Footprint.now().children <= before.children)
    wait_for(lambda: Footprint.now().threads <= before.threads)
    assert set(Footprint.now().descriptors.items()) <= set(before.descriptors.items())


def audit(store: kvstore.Store) -> None:
    """No slot lost, no lease left, once everything that was on its way has come to its end."""

    def settled() -> bool:
        stats = store.stats()
        return not (stats.leased or stats.promoting or stats.quarantined or store.busy)

    wait_for(settled, 30)
    store._catalog.audit()
    stats = store.stats()
    assert not store._catalog.filling
    assert len(store._catalog.ready) + store._catalog.free == stats.slots == SLOTS


def audit_storage(root: Path) -> None:
    """What lies in the tiers is good, known to be bad, or the leaving of a killed writer; nothing else."""
    for place in ("near", "far"):
        config = kvstore.TierConfig(url=f"file://{root}/{place}", name=place)
        for space in spaces(config):
            kinds = {finding.status for finding in scan(space)}
            assert kinds <= {Status.GOOD, Status.CORRUPT, Status.FOREIGN, Status.TEMP, Status.QUARANTINED}, (
                kinds
            )
