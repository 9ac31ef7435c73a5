"""Room in a tier that has a capacity, decided without I/O."""

from __future__ import annotations

from planning import OK, Desk, failed

from kvstore.config import TierConfig
from kvstore.engine.base import Batch, Completion, Result, Status, Verb
from kvstore.frame import object_size
from support.chunks import CHUNK, chunk_key

KEYS = [chunk_key(number) for number in range(12)]
A, B, C, D, E = KEYS[:5]
CREATED = Result(Status.OK, 1)
SIZE = object_size(CHUNK)


def open_desk(*rows: bytes, objects: int = 2, slots: int = 8, slice_items: int = 8) -> Desk:
    """A desk over a tier with room for `objects`, in which a scan has found `rows`, oldest first."""
    config = TierConfig(
        url="memory://x", name="disk", capacity=objects * SIZE, workers=1, timeout=1.0, read=False
    )
    desk = Desk(config, slots=slots, slice_items=slice_items)
    desk.advance()
    finish_scan(desk, *rows)
    return desk


def finish_scan(desk: Desk, *rows: bytes) -> Batch:
    batch = desk.batch(Verb.SCAN)
    found = [(key, SIZE, float(age)) for age, key in enumerate(rows)]
    desk.planner.apply(Completion(batch.id, 0, [], found, {}), desk.now)
    desk.answer(batch, OK)
    return batch


def used(desk: Desk) -> int:
    ledger = desk.tiers[0].ledger
    assert ledger is not None
    return ledger.used + ledger.expected


def finish(desk: Desk) -> None:
    """Answer whatever comes, well."""
    while desk.batches:
        desk.answer(desk.batches[0], CREATED)
        assert used(desk) <= (desk.tiers[0].config.capacity or 0)


def test_nothing_is_written_before_the_tier_is_known() -> None:
    config = TierConfig(url="memory://x", capacity=2 * SIZE, workers=1, timeout=1.0)
    desk = Desk(config)
    desk.store(A)
    assert [batch.verb for batch in desk.batches] == [Verb.SCAN]
    finish_scan(desk, B)
    assert desk.asked(Verb.WRITE) == [[A]]


def test_writes_go_on_without_a_scan_that_fails_or_hangs() -> None:
    config = TierConfig(url="memory://x", capacity=2 * SIZE, workers=1, timeout=1.0)
    for end in (failed(), None):
        desk = Desk(config)
        desk.store(A)
        scan = desk.batch(Verb.SCAN)
        if end:
            desk.answer(scan, end)
        else:
            desk.advance(1.0)
        assert desk.asked(Verb.WRITE) == [[A]]


def test_rows_of_a_scan_that_was_given_up_are_not_used() -> None:
    desk = Desk(TierConfig(url="memory://x", capacity=2 * SIZE, workers=1, timeout=1.0))
    desk.advance()
    scan = desk.batch(Verb.SCAN)
    desk.advance(1.0)
    desk.planner.apply(Completion(scan.id, 0, [], [(A, SIZE, 0.0)], {}), desk.now)
    assert used(desk) == 0
    assert not desk.planner._cascader._keeper._gates[0].rows


def test_a_scan_lives_as_long_as_rows_come() -> None:
    desk = Desk(TierConfig(url="memory://x", capacity=4 * SIZE, workers=1, timeout=1.0))
    desk.advance()
    scan = desk.batch(Verb.SCAN)
    for n in range(4):
        desk.advance(0.9)
        desk.planner.apply(Completion(scan.id, 0, [], [(KEYS[n], SIZE, 0.0)], {}), desk.now)
    desk.answer(scan, OK)
    assert desk.abandoned == [] and used(desk) == 4 * SIZE


def test_the_oldest_make_room_and_no_more_than_needed() -> None:
    desk = open_desk(A, B, C, objects=3)
    desk.store(D)
    assert desk.asked(Verb.DELETE) == [[A]] and desk.asked(Verb.WRITE) == []
    desk.answer(desk.batch(Verb.DELETE), OK)
    assert desk.asked(Verb.WRITE) == [[D]]
    finish(desk)
    assert desk.tiers[0].counters.evictions == 1 and desk.tiers[0].counters.deletes == 0


def test_many_writes_never_exceed_the_capacity() -> None:
    desk = open_desk(A, objects=2)
    for key in KEYS[1:7]:
        desk.store(key)
    finish(desk)
    assert used(desk) == 2 * SIZE
    assert desk.catalog.idle == 6


def test_a_chunk_larger_than_the_tier_is_dropped() -> None:
    desk = open_desk(objects=1)
    tier = desk.tiers[0]
    assert tier.ledger is not None
    tier.ledger.capacity = SIZE - 1
    desk.store(A)
    assert tier.counters.dropped == 1 and not tier.writing


def test_dropping_one_write_does_not_strand_those_behind_it() -> None:
    desk = open_desk(A, objects=1)
    desk.store(B, C, D)
    desk.planner.delete([A], desk.now)
    desk.answer(desk.batch(Verb.DELETE), failed())  # A stays, hidden: there will never be room
    assert not desk.tiers[0].writing and desk.tiers[0].counters.dropped == 3


def test_a_withdrawn_write_makes_room_for_the_next() -> None:
    desk = open_desk(objects=1)
    for key in KEYS[8:10]:
        desk.planner.delete([key], desk.now)
        desk.advance()
    assert len(desk.asked(Verb.DELETE)) == 2, "workers have all that they can take"
    desk.store(A, B)
    assert used(desk) == SIZE and desk.tiers[0].writing.keys() == {A, B}
    desk.planner.delete([A], desk.now)
    finish(desk)
    assert not desk.tiers[0].writing and desk.tiers[0].counters.writes == 1


def test_a_victim_that_cannot_be_deleted_costs_one_write_and_is_seen_again() -> None:
    desk = open_desk(A, B, objects=2)
    desk.store(C)
    assert desk.asked(Verb.DELETE) == [[A]]
    desk.answer(desk.batch(Verb.DELETE), failed())
    assert desk.tiers[0].counters.dropped == 1
    assert not desk.tiers[0].tombs, "nobody asked for its end"
    desk.store(D)
    assert desk.asked(Verb.DELETE) == [[B]], "another one is tried"


def test_a_delete_that_joins_a_failing_eviction_keeps_the_chunk_hidden() -> None:
    desk = open_desk(A, objects=1)
    desk.store(B)
    erasure = desk.planner.delete([A], desk.now)
    desk.answer(desk.batch(Verb.DELETE), failed())
    assert erasure.errors and set(desk.tiers[0].tombs) == {A}


def test_what_waits_for_room_is_dropped_when_the_tier_goes_down() -> None:
    desk = open_desk(A, objects=1)
    desk.store(B, C)
    desk.tiers[0].writes.breaker.trip(desk.now)
    desk.answer(desk.batch(Verb.DELETE), failed())
    assert not desk.tiers[0].writing
