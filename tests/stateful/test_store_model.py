"""The whole store against a dict: it may miss, it never lies, and it loses nothing of its own.

Hypothesis chooses the stack, the calls, when each batch of work is done and how it ends, what others do to
the storage, and how time passes. The model knows for each key which versions of its chunk may be served:
those stored since the last delete, or found on storage at open. Nothing happens behind the machine's back.

``KVSTORE_MODEL_EXAMPLES`` sets the number of examples, for a long run before a release.
"""

from __future__ import annotations

import os
import random
import uuid
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check_outcome, check_settled, check_slots, check_tiers
from storage_access import Outsider

from kvstore import BackendError, Job, Lookup, NoSpaceError, Prefetched, ReadLease, Store, WriteLease
from kvstore.backends import memory
from kvstore.engine.base import Batch, Verb
from kvstore.health import Breaker
from kvstore.planner import TierState
from support.chunks import chunk_key, payload, version_of
from support.scripted import Clock, Held, ScriptedEngine, open_scripted

pytestmark = pytest.mark.timeout(900)  # so many examples take a busy machine minutes

#: Options of the tiers that a stack is made of; each operation has a second.
TIERS = (
    "write=through",
    "write=through&workers=1",
    "write=through&capacity=24KiB",
    "write=on-evict",
    "write=on-evict&capacity=16KiB",
    "write=off",
    "write=through&read=off",
)
KEYS = [chunk_key(number) for number in range(7)]

some_key = st.sampled_from(KEYS)
some_keys = st.lists(some_key, min_size=1, max_size=7)
stacks = st.lists(st.sampled_from(TIERS), min_size=1, max_size=3)
scripts = st.lists(st.sampled_from([0, 0, 0, 0, 1, 2, 3, -1]), min_size=4, max_size=16)
patience = st.sampled_from([0.2, 0.2, 0.2, 0.0, 0.02, 3.0])
which = st.integers(0, 11)
plants = st.lists(st.tuples(which, some_key), min_size=2, max_size=14)
outages = st.sampled_from([(), (), (), (0,)])
endings = st.sampled_from(["run", "run", "run", "poll", "poll", "fail", "fail-after", "die", "cancel"])


Outage = tuple[int, ...]


class StoreModel(RuleBasedStateMachine):
    """One store, its engine, its clock, and what it may serve."""

    store: Store
    engine: ScriptedEngine
    outsiders: list[Outsider]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.opened = False
        self.names: list[str] = []
        self.allowed: dict[bytes, set[int]] = {key: set() for key in KEYS}
        self.version = dict.fromkeys(KEYS, 0)
        self.reads: list[ReadLease] = []
        self.seen: dict[ReadLease, dict[bytes, bytes]] = {}
        self.writes: list[WriteLease] = []
        self.jobs: list[tuple[list[bytes], Job[Prefetched]]] = []

    # Opening and closing.

    @initialize(
        stack=stacks,
        slots=st.integers(2, 6),
        policy=st.sampled_from(["lru", "arc", "priority"]),
        planted=plants,
        down=outages,
    )
    def open_first(
        self,
        stack: list[str],
        slots: int,
        policy: str,
        planted: list[tuple[int, bytes]],
        down: Outage,
    ) -> None:
        self.names = [uuid.uuid4().hex for _ in stack]
        self.stack = [
            f"memory://{name}?{options}&timeout=1s&retries=0&required=false&name=tier{i}"
            for i, (name, options) in enumerate(zip(self.names, stack, strict=True))
        ]
        self.slots, self.policy = slots, policy
        self.open_again(planted, down)

    def open_again(self, planted: list[tuple[int, bytes]], down: Outage) -> None:
        """Open the store; what is on storage now is what it may serve."""
        self.store, self.engine, _ = open_scripted(
            *self.stack, slots=self.slots, policy=self.policy, clock=self.clock, down=down
        )
        self.most: dict[TierState, int] = {}
        space = self.store.namespace
        self.outsiders = [Outsider(name, space.directory, space.fingerprint) for name in self.names]
        for tier in self.store._planner.tiers:
            for direction in (tier.reads, tier.writes):
                blocked = direction.breaker.blocked(self.clock())
                direction.breaker = Breaker(random.Random(0))  # the jitter is part of what can be repeated
                if blocked:
                    direction.breaker.trip(self.clock())
        self.engine.before_run = self.check_batch
        self.opened = True
        for i, key in planted:
            self.plant(i, key)
        for key in KEYS:
            self.allowed[key] = set().union(*(outsider.versions(key) for outsider in self.outsiders))

    @rule(
        script=scripts,
        timeout=patience,
        planted=plants,
        down=outages,
    )
    def close_and_open(
        self, script: list[int], timeout: float, planted: list[tuple[int, bytes]], down: Outage
    ) -> None:
        self.end_leases()
        self.close(script, timeout)
        self.open_again(planted, down)

    def close(self, script: list[int], timeout: float) -> None:
        self.engine.script = deque(script)
        written = self.store.close(timeout)
        if written:
            for tier in self.store._planner.tiers:
                assert not tier.owed
                assert tier.writing.keys() <= tier.overdue
        assert self.engine.closed
        assert self.store.close()
        for keys, job in self.jobs:
            assert job.future.done()
            if not job.future.cancelled() and job.future.exception() is None:
                check_outcome(keys, job)
        self.jobs.clear()

    def end_leases(self) -> None:
        for lease in self.reads:
            lease.release()
        for filling in self.writes:
            filling.abort()
        self.reads.clear()
        self.seen.clear()
        self.writes.clear()

    def teardown(self) -> None:
        if not self.opened:
            return
        try:
            self.settle()
        finally:
            if not self.engine.closed:
                self.close([], 0.0)
            for name in self.names:
                memory.forget(name)

    def settle(self) -> None:
        """Answer everything, end every lease, and look for what has been lost."""
        self.end_leases()
        for _ in range(40):
            self.engine.run_all()
            self.store.poll()
            self.clock.advance(0.1 if self.engine.held else 80.0)  # breakers cool down in 75 s at most
        check_settled(self.store)
        self.check_after_step()
        self.jobs = [(keys, job) for keys, job in self.jobs if not job.future.cancelled()]
        assert all(job.future.done() for _, job in self.jobs)
        self.engine.script.extend([0] * 200)
        assert self.store.close(1000.0)
        for keys, job in self.jobs:
            check_outcome(keys, job)

    # Calls.

    @rule(key=some_key, script=scripts, timeout=patience)
    def put(self, key: bytes, script: list[int], timeout: float) -> None:
        self.put_many([key], script, timeout)

    @rule(keys=some_keys, script=scripts, timeout=patience)
    def put_many(self, keys: list[bytes], script: list[int], timeout: float) -> None:
        self.engine.script = deque(script)
        items = {key: payload(key, self.version[key]) for key in keys}
        for key in keys:
            self.allowed[key].add(self.version[key])
        try:
            self.store.put_many(items, timeout=timeout)
        except NoSpaceError:
            pass

    @rule(keys=some_keys, script=scripts, timeout=patience)
    def get(self, keys: list[bytes], script: list[int], timeout: float) -> None:
        self.engine.script = deque(script)
        for key, data in self.store.get_many(keys, timeout=timeout).items():
            self.check_served(key, data)

    @rule(keys=some_keys)
    def lookup_then_read(self, keys: list[bytes]) -> None:
        hits = [
            key for key, answer in zip(keys, self.store.lookup(keys), strict=True) if answer is Lookup.HIT
        ]
        lease = self.lease(hits)
        assert not lease.missing, "a HIT was gone at the next call"

    @rule(keys=some_keys)
    def read(self, keys: list[bytes]) -> None:
        self.lease(keys)

    def lease(self, keys: list[bytes]) -> ReadLease:
        lease = self.store.read(keys)
        self.seen[lease] = {key: bytes(view) for key, view in lease.items()}
        for key, data in self.seen[lease].items():
            self.check_served(key, data)
        self.reads.append(lease)
        return lease

    @precondition(lambda self: self.reads)
    @rule(i=which)
    def release(self, i: int) -> None:
        lease = self.reads.pop(i % len(self.reads))
        del self.seen[lease]
        lease.release()

    @rule(keys=some_keys)
    def reserve(self, keys: list[bytes]) -> None:
        lease = self.store.reserve(keys)
        assert sorted({*lease, *lease.present, *lease.refused}) == sorted(set(keys))
        for key, view in lease.items():
            data = payload(key, self.version[key])
            view[: len(data)] = data
            lease.set_length(key, len(data))
            self.allowed[key].add(self.version[key])
        self.writes.append(lease)

    @precondition(lambda self: self.writes)
    @rule(i=which, well=st.booleans())
    def end_write(self, i: int, well: bool) -> None:
        lease = self.writes.pop(i % len(self.writes))
        if well:
            lease.commit()
        else:
            lease.abort()

    @rule(keys=some_keys)
    def prefetch(self, keys: list[bytes]) -> None:
        self.jobs.append((keys, self.store.prefetch(keys)))

    @precondition(lambda self: self.jobs)
    @rule(i=which)
    def cancel(self, i: int) -> None:
        self.jobs[i % len(self.jobs)][1].cancel()

    @rule(keys=some_keys, script=scripts, timeout=patience)
    def delete(self, keys: list[bytes], script: list[int], timeout: float) -> None:
        self.engine.script = deque(script)
        try:
            self.store.delete(keys, timeout=timeout)
        except BackendError:
            gone = False
        else:
            gone = True
        for key in keys:
            self.allowed[key].clear()  # also after an error it stays hidden
            self.version[key] += 1
            assert not gone or not any(
                outsider.versions(key)
                for outsider, tier in zip(self.outsiders, self.store._planner.tiers, strict=True)
                if tier.config.write != "off"
            )

    @rule(script=scripts, timeout=patience)
    def flush(self, script: list[int], timeout: float) -> None:
        self.engine.script = deque(script)
        before = [(tier, dict(tier.writing)) for tier in self.store._planner.tiers]
        if self.store.flush(timeout=timeout):
            for tier, writing in before:
                assert {key for key in writing if tier.writing.get(key) == writing[key]} <= tier.overdue

    @rule(keys=some_keys, priority=st.integers(0, 100))
    def touch(self, keys: list[bytes], priority: int) -> None:
        self.store.touch(keys)
        self.store.set_priority(keys, priority)

    @rule()
    def look(self) -> None:
        stats = self.store.stats()
        assert stats.slots == self.slots and stats.host.chunks <= self.slots
        for event in self.store.events():
            assert set(event.keys) <= set(KEYS)

    # What workers do.

    @precondition(lambda self: self.engine.held)
    @rule(answers=st.lists(st.tuples(which, st.sampled_from([1, 2, 100]), endings), min_size=1, max_size=6))
    def answer(self, answers: list[tuple[int, int, str]]) -> None:
        """Some batches go on, one after the other; the store looks now and then."""
        for i, n, ending in answers:
            if ending == "poll":
                self.store.poll()
            elif self.engine.held:
                self.end(self.engine.held[i % len(self.engine.held)], n, ending)

    def end(self, held: Held, n: int, ending: str) -> None:
        engine = self.engine
        if ending == "run":
            engine.run(held, n)
        elif ending == "die":
            engine.die(held)
        elif ending == "cancel":
            engine.cancel(held)
        else:
            engine.fail(held, n, after=ending == "fail-after")

    @rule()
    def run_everything(self) -> None:
        for _ in range(20):
            self.engine.run_all()
            self.store.poll()

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.6, 1.1, 6.0, 100.0, 700.0]), poll=st.booleans())
    def time_passes(self, seconds: float, poll: bool) -> None:
        self.clock.advance(seconds)
        self.poll(poll)

    @rule(poll=st.just(True))
    def poll(self, poll: bool) -> None:
        if poll:
            self.store.poll()

    # What others do to the storage.

    @rule(i=which, key=some_key)
    def plant(self, i: int, key: bytes) -> None:
        outsider = self.outsiders[i % len(self.outsiders)]
        if not outsider.has(key):
            outsider.write(key, self.version[key])
            self.allowed[key].add(self.version[key])

    @rule(i=which, key=some_key, other=some_key, place=st.sampled_from([-1, -2, 0, 70, 4095, 4096, 4120]))
    def meddle(self, i: int, key: bytes, other: bytes, place: int) -> None:
        outsider = self.outsiders[i % len(self.outsiders)]
        if place == -1:
            outsider.delete(key)
        elif place == -2:
            outsider.swap(key, other)
        else:
            outsider.damage(key, place)

    # What must hold.

    def check_served(self, key: bytes, data: bytes) -> None:
        assert version_of(key, data) in self.allowed[key], "an old version came back"

    def check_batch(self, batch: Batch) -> None:
        """What is about to be written to a tier is a chunk of that key."""
        if batch.verb is Verb.WRITE:
            for key, slot, length in zip(batch.keys, batch.slots, batch.lengths, strict=True):
                version_of(key, bytes(self.store.arena.view(slot)[:length]))

    @invariant()
    def check_after_step(self) -> None:
        if not self.opened:
            return
        check_slots(self.store, self.engine, self.reads, self.writes)
        check_tiers(self.store, self.most)
        for lease, seen in self.seen.items():
            for key, data in seen.items():
                assert lease[key] == data, "a leased chunk has changed"
        for key in self.store._planner.catalog.ready:
            slot = self.store._planner.catalog.ready[key]
            self.check_served(key, bytes(self.store._payload(slot)))


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(
    max_examples=int(os.environ.get("KVSTORE_MODEL_EXAMPLES", "250")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
