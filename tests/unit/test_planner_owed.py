"""Writes that find the queue full wait without holding a slot; what is stored after them may have to wait."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from planning import Desk, failed

from kvstore.config import TierConfig
from kvstore.engine.base import Result, Status, Verb
from kvstore.planner import Prefix
from support.chunks import CHUNK, chunk_key
from support.scripted import open_scripted

KEYS = [chunk_key(number) for number in range(12)]
A, B, C, D, E, F = KEYS[:6]
NEW = [chunk_key(number) for number in range(100, 106)]
CREATED = Result(Status.OK, 1)


def tier(**options: Any) -> TierConfig:
    defaults = {"url": "memory://x", "workers": 1, "timeout": 1.0, "name": "disk"}
    return TierConfig(**{**defaults, **options})


def narrow(*tiers: TierConfig, slots: int, limit: int = 2) -> Desk:
    """A desk whose tiers queue `limit` writes at most, and write one batch of one chunk at a time."""
    desk = Desk(*tiers, slots=slots, slice_items=1)
    for state in desk.tiers:
        state.write_limit = limit
        state.writes.window = 1
    return desk


def write(desk: Desk, *, tier: int = 0) -> list[bytes]:
    """Answer all writes of a tier, also those that become due; returns their keys, in order."""
    keys: list[bytes] = []
    while any(batch.verb is Verb.WRITE and batch.tier == tier for batch in desk.batches):
        batch = desk.batch(Verb.WRITE, tier)
        keys += batch.keys
        desk.answer(batch, CREATED)
    return keys


def reserve(desk: Desk, *keys: bytes, after: tuple[bytes, ...] = ()) -> list[bytes]:
    return list(desk.planner.reserve(keys, desk.now, lossless=False, after=Prefix(after)))


# Waiting for a place in the queue.


def test_what_finds_the_queue_full_is_written_later_in_order() -> None:
    desk = narrow(tier(), slots=6)
    desk.store(A, B, C, D)
    assert desk.tiers[0].writing.keys() == {A, B}
    assert write(desk) == [A, B, C, D]
    assert desk.tiers[0].counters.dropped == 0
    assert not desk.tiers[0].owed


def test_nobody_overtakes_those_who_wait() -> None:
    desk = narrow(tier(), slots=6)
    desk.store(A, B, C)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    desk.store(D)
    assert write(desk) == [B, C, D]


def test_those_who_wait_count_as_queued() -> None:
    store, engine, _ = open_scripted("memory://waiting", slots=4)  # two may be queued
    with store:
        with store.reserve([A, B, C]):
            pass
        assert store.stats().tier("memory").queued == 3
        engine.run_all()
        store.poll()
        assert store.stats().tier("memory").queued == 1
        engine.run_all()


def test_a_chunk_that_waits_holds_no_slot_and_is_dropped_when_it_is_evicted() -> None:
    desk = narrow(tier(), slots=3)
    desk.store(A, B, C)
    desk.store(D)  # there is no other slot than that of C
    assert desk.tiers[0].counters.dropped == 1
    assert write(desk) == [A, B, D]


def test_a_chunk_that_is_deleted_waits_no_more() -> None:
    desk = narrow(tier(), slots=4)
    desk.store(A, B, C)
    desk.planner.delete([C], desk.now)
    assert not desk.tiers[0].owed
    assert desk.tiers[0].counters.dropped == 0


def test_what_a_remote_tier_has_does_not_wait() -> None:
    desk = narrow(tier(url="s3://bucket"), slots=4)
    desk.found(C)
    desk.store(A, B, C)
    assert not desk.tiers[0].owed


def test_a_tier_that_goes_down_gets_nothing_of_it() -> None:
    desk = narrow(tier(), slots=6)
    desk.store(A, B, C, D)
    desk.tiers[0].writes.breaker.trip(desk.now)
    desk.advance()
    assert desk.tiers[0].counters.dropped == 2
    assert not desk.tiers[0].owed


def test_a_queue_full_of_writes_past_their_deadlines_is_not_waited_for() -> None:
    """One worker that hangs does not open the breaker, and may never answer."""
    desk = narrow(tier(), slots=4, limit=1)
    desk.store(A, B)
    sequence = desk.planner.write_sequence
    desk.advance(1.0)
    assert desk.tiers[0].overdue == {A}
    desk.advance()
    assert desk.tiers[0].counters.dropped == 1
    assert desk.planner.settled(sequence)


def test_a_failure_makes_room_as_well() -> None:
    desk = narrow(tier(), slots=4, limit=1)
    desk.store(A, B)
    desk.answer(desk.batch(Verb.WRITE), failed())
    assert desk.asked(Verb.WRITE) == [[B]]


def test_flush_waits_for_those_who_wait_and_not_for_later_ones() -> None:
    desk = narrow(tier(), slots=6)
    desk.store(A, B, C)
    sequence = desk.planner.write_sequence
    desk.store(D)
    for _ in range(3):
        assert not desk.planner.settled(sequence)
        desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert desk.planner.settled(sequence)
    assert not desk.planner.settled(desk.planner.write_sequence)


def test_close_waits_for_those_who_wait() -> None:
    desk = narrow(tier(), slots=6)
    desk.store(A, B, C)
    assert not desk.planner.pay_all(desk.now)
    write(desk)
    assert desk.planner.pay_all(desk.now)


def test_a_lossless_caller_waits_for_them_and_evicts_none() -> None:
    desk = narrow(tier(), slots=4)
    desk.store(A, B, C)
    assert not desk.planner.has_room(D, desk.now)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert not desk.planner.has_room(D, desk.now), "C is first"
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert desk.planner.has_room(D, desk.now)


# What is stored after them.


def test_what_is_worth_nothing_without_them_waits() -> None:
    desk = narrow(tier(), slots=4)
    desk.store(A, B, C, D)
    assert reserve(desk, E, after=(A, B, C, D)) == []
    assert desk.catalog.ready.keys() == {A, B, C, D}
    for _ in (A, B):  # their slots come back
        desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert reserve(desk, E, F, after=(A, B, C, D)) == [E, F]
    assert desk.catalog.ready.keys() == {C, D}


def test_all_of_it_or_nothing() -> None:
    desk = narrow(tier(), slots=4)
    desk.store(A, B, C, D)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert reserve(desk, E, F, after=(A, B, C, D)) == []
    assert reserve(desk, E, after=(A, B, C, D)) == [E]


def test_others_go_before_them() -> None:
    """They are older, and would be the first to go."""
    desk = narrow(tier(), slots=4)
    desk.store(A, B, C, D)
    write(desk)
    desk.store(E, F)
    desk.store(A)
    assert desk.tiers[0].owed.keys() == {A}
    desk.planner.renew([E, F])
    assert reserve(desk, *KEYS[6:7], after=(A,)) == KEYS[6:7]
    assert A in desk.catalog.ready


def test_a_chunk_that_some_tier_has_may_go() -> None:
    """A slow tier holds up nothing while a faster one keeps pace."""
    desk = narrow(tier(), tier(name="slow"), slots=6)
    desk.store(A, B, C, D)
    write(desk)
    assert desk.tiers[1].owed.keys() == {C, D}
    assert reserve(desk, *KEYS[4:8], after=(A, B, C, D)) == KEYS[4:8]
    assert desk.tiers[1].counters.dropped == 2


def test_nothing_is_kept_for_a_tier_that_is_down() -> None:
    desk = narrow(tier(), slots=4)
    desk.store(A, B, C, D)
    desk.tiers[0].writes.breaker.trip(desk.now)
    assert reserve(desk, E, F, after=(A, B, C, D)) == [E, F]


def test_nothing_is_kept_without_tiers() -> None:
    desk = Desk(slots=4)
    desk.store(A, B, C, D)
    assert reserve(desk, E, F, after=(A, B, C, D)) == [E, F]


def test_a_tier_that_is_written_on_eviction_gets_them_first() -> None:
    desk = narrow(tier(write="on-evict"), slots=4, limit=4)
    desk.store(A, B)
    desk.planner.pay_all(desk.now)
    desk.advance()
    write(desk)
    desk.store(C, D)
    assert reserve(desk, E, F, *KEYS[6:8], after=(A, B, C, D)) == []
    desk.advance()
    assert desk.tiers[0].writing.keys() == {C, D}
    write(desk)
    assert reserve(desk, E, F, *KEYS[6:8], after=(A, B, C, D)) == [E, F, *KEYS[6:8]]


def commit_to(desk: Desk, name: str, *keys: bytes) -> None:
    """Store chunks that go to one tier alone."""
    slots = desk.planner.reserve(keys, desk.now, lossless=False)
    desk.planner.commit([(key, slot, CHUNK) for key, slot in slots.items()], desk.now, tiers=(name,))
    desk.advance()


def test_what_goes_to_one_of_two_tiers_is_in_none_yet() -> None:
    desk = narrow(tier(), tier(name="other"), slots=4)
    commit_to(desk, "other", A, B, C, D)
    assert desk.tiers[1].owed.keys() == {C, D}
    assert reserve(desk, E, after=(A, B, C, D)) == []
    desk.answer(desk.batch(Verb.WRITE, 1), CREATED)
    assert reserve(desk, E, after=(A, B, C, D)) == [E]
    assert A not in desk.catalog.ready


def test_where_there_is_plenty_what_is_owed_stays_although_it_is_older() -> None:
    desk = narrow(tier(), slots=5)
    desk.store(A, B, C)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    desk.store(D, E)
    assert desk.tiers[0].owed.keys() == {D, E}
    desk.planner.renew([A])
    assert reserve(desk, F, after=(D, E)) == [F]
    assert desk.catalog.ready.keys() == {B, C, D, E}


# One who asks again and again.


def test_nothing_is_looked_at_until_enough_writes_have_ended() -> None:
    desk = narrow(tier(), slots=4)
    desk.store(A, B, C, D)
    prefix = Prefix([A, B, C, D])
    assert not desk.planner.reserve([E, F], desk.now, lossless=False, after=prefix)
    before = prefix.unsaved
    assert not desk.planner.fits([E, F], desk.now, after=prefix)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert not desk.planner.reserve([E, F], desk.now, lossless=False, after=prefix)
    assert prefix.unsaved is before == [A, B, C, D]
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert list(desk.planner.reserve([E, F], desk.now, lossless=False, after=prefix)) == [E, F]
    assert desk.catalog.ready.keys() == {C, D}


def test_a_tier_that_is_written_on_eviction_gets_all_of_them_while_somebody_asks() -> None:
    """Also where its queue takes far fewer at a time than have to go."""
    desk = narrow(tier(write="on-evict"), slots=8, limit=2)
    desk.store(*KEYS[:8])
    prefix = Prefix(KEYS[:8])
    for _ in KEYS[:8]:
        if desk.planner.reserve(NEW, desk.now, lossless=False, after=prefix):
            break
        desk.advance()
        desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert desk.catalog.filling.keys() == set(NEW)
    assert desk.tiers[0].counters.dropped == 0


class Bustle:
    """Callers, workers and readers who do this and that with the chunks of one prefix, and with others."""

    def __init__(self, seed: int) -> None:
        self.luck = Random(seed)
        self.desk = narrow(tier(), tier(name="other"), slots=8, limit=3)
        self.prefix = Prefix()
        self.leases: list[list[int]] = []
        self.actions = [self.store, self.store, self.answer, self.answer, self.answer]
        self.actions += [self.lease, self.drop, self.delete]

    def store(self) -> None:
        keys = self.luck.sample(self.luck.choice([KEYS[:8], KEYS[8:]]), 2)
        new = self.desk.planner.absent(keys)
        commit_to(self.desk, self.luck.choice(["disk", "other"]), *keys)
        self.prefix.extend(key for key in new if key in KEYS[:8])

    def answer(self) -> None:
        if self.desk.batches:
            batch = self.luck.choice(self.desk.batches)
            self.desk.answer(batch, *[self.luck.choice([CREATED, CREATED, failed()]) for _ in batch.keys])

    def lease(self) -> None:
        held, _ = self.desk.planner.hold(self.luck.sample(KEYS, 3))
        self.leases.append(list(held.values()))

    def drop(self) -> None:
        if self.leases:
            self.desk.planner.drop(self.leases.pop())

    def delete(self) -> None:
        self.desk.planner.delete([self.luck.choice(KEYS)], self.desk.now)
        self.desk.advance()


@pytest.mark.parametrize("seed", range(30))
def test_who_asks_again_gets_the_same_answers_as_who_asks_anew(seed: int) -> None:
    """Whatever happens in between."""
    bustle = Bustle(seed)
    luck, planner, now = bustle.luck, bustle.desk.planner, bustle.desk.now
    for _ in range(200):
        for _ in range(luck.randint(1, 8)):
            luck.choice(bustle.actions)()
        wanted, anew = NEW[: luck.randint(1, 6)], Prefix(KEYS[:8])
        assert planner.fits(wanted, now, after=bustle.prefix) == planner.fits(wanted, now, after=anew)
