"""What must be true of a store after every step, and when everything has settled."""

from __future__ import annotations

from kvstore.catalog import SlotState
from kvstore.engine.base import Verb
from kvstore.jobs import Job, Prefetched
from kvstore.leases import ReadLease, WriteLease
from kvstore.planner import Planner, TierState
from kvstore.store import Store
from support.scripted import ScriptedEngine

__all__ = ["check_outcome", "check_settled", "check_slots", "check_tiers"]


def check_slots(
    store: Store, engine: ScriptedEngine, reads: list[ReadLease], writes: list[WriteLease]
) -> None:
    """Every slot has one owner, and every owner is somebody that we know."""
    planner: Planner = store._planner
    catalog = planner.catalog
    catalog.audit()
    held = sum(map(len, reads)) + sum(len(tier.writing) for tier in planner.tiers)
    assert sum(catalog.leases(slot) for slot in range(catalog.slots)) == held
    states = [catalog.state(slot) for slot in range(catalog.slots)]
    assert states.count(SlotState.FILLING) == sum(map(len, writes)) + planner.promoting
    late = [(held, held.left) for held in engine.held]
    late += [(held, len(answer.results)) for held, answer in engine.unread]
    assert catalog.quarantined == sum(
        n for held, n in late if held.abandoned and held.batch.verb is Verb.READ
    )
    assert planner.promoting <= max(1, catalog.slots // 2)
    _check_owners(engine)


def _check_owners(engine: ScriptedEngine) -> None:
    """No slot is filled by two workers, or filled by one while another writes it to a tier."""
    filled: list[int] = []
    sources: set[int] = set()
    for held in engine.held:
        slots = held.rest(held.left).slots
        if held.batch.verb is Verb.READ:
            filled.extend(slots)
        elif held.batch.verb is Verb.WRITE:
            sources.update(slots)
    assert len(filled) == len(set(filled)), "two workers fill one slot"
    assert not sources.intersection(filled), "a slot is filled while it is written to a tier"


def check_tiers(store: Store, most: dict[TierState, int]) -> None:
    """Limits of the tiers hold.

    `most` remembers what a tier with a capacity may hold: a tier that was found too full may only shrink.
    """
    for tier in store._planner.tiers:
        assert len(tier.writing) <= tier.write_limit
        assert tier.overdue <= tier.writing.keys()
        assert tier.config.write != "off" or not (tier.writing or tier.owed)
        assert tier.owed.keys() <= store._planner.catalog.ready.keys() - tier.writing.keys()
        assert 0 <= tier.reads.in_flight <= tier.reads.window
        assert 0 <= tier.writes.in_flight <= tier.writes.window
        if tier.ledger is not None:
            assert tier.ledger.expected >= 0
            total = tier.ledger.used + tier.ledger.expected
            assert total <= most.get(tier, total)
            if len(tier.ledger):
                most[tier] = max(tier.ledger.capacity, min(total, most.get(tier, total)))


def check_settled(store: Store) -> None:
    """Nothing is under way and nobody holds anything: no slot is lost."""
    planner: Planner = store._planner
    catalog = planner.catalog
    assert not store.busy
    assert planner.promoting == 0
    assert all(catalog.leases(slot) == 0 for slot in range(catalog.slots))
    assert catalog.free + len(catalog.ready) == catalog.slots
    for tier in planner.tiers:
        assert not tier.writing and not tier.overdue
        assert tier.config.write != "through" or not tier.owed
        assert tier.reads.in_flight == tier.writes.in_flight == 0
        assert tier.ledger is None or tier.ledger.expected == 0
    assert not store._jobs
    assert not planner._fetcher._waiters
    assert not planner._fetcher._blocked
    assert not planner._fetcher._probing
    assert not any(planner._locator._walking)
    assert not planner._eraser._waiting
    assert not planner._eraser._behind_write


def check_outcome(keys: list[bytes], job: Job[Prefetched]) -> None:
    """Every key is in exactly one of the three lists."""
    error = job.future.exception()
    if error is None:
        ends = [key for part in job.future.result() for key in part]
        assert sorted(ends) == sorted(set(keys))
