"""Cascades and deletion, decided without I/O: what is written when, deadlines, order."""

from __future__ import annotations

from typing import Any

import pytest
from planning import OK, Desk, failed

from kvstore.config import TierConfig
from kvstore.engine.base import Result, Status, Verb
from kvstore.health import BreakerState
from support.chunks import CHUNK, chunk_key

KEYS = [chunk_key(number) for number in range(12)]
A, B, C, D = KEYS[:4]
CREATED, THERE = Result(Status.OK, 1), Result(Status.OK, 0)


def tier(**options: Any) -> TierConfig:
    defaults = {"url": "memory://x", "workers": 1, "timeout": 1.0, "name": "disk"}
    return TierConfig(**{**defaults, **options})


# Cascades.


def test_a_stored_chunk_goes_to_every_write_through_tier() -> None:
    desk = Desk(tier(), tier(write="off"), tier(read=False), tier(write="on-evict"))
    desk.store(A)
    assert [(batch.verb, batch.tier, batch.keys, batch.lengths) for batch in desk.batches] == [
        (Verb.WRITE, 0, [A], [CHUNK]),
        (Verb.WRITE, 2, [A], [CHUNK]),
    ]


def test_a_written_chunk_is_counted_and_reported() -> None:
    desk = Desk(tier())
    desk.store(A)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    counters = desk.tiers[0].counters
    assert (counters.writes, counters.written_bytes) == (1, CHUNK)
    kinds = [(event.kind, event.source, event.target) for event in desk.events()]
    assert kinds == [("stored", None, "host"), ("stored", "host", "disk")]


def test_a_chunk_that_was_there_is_not_counted_as_written() -> None:
    desk = Desk(tier())
    desk.store(A)
    desk.answer(desk.batch(Verb.WRITE), THERE)
    assert (desk.tiers[0].counters.writes, len(desk.events())) == (0, 1)


def test_what_a_remote_tier_has_is_not_sent_again() -> None:
    desk = Desk(tier(url="s3://bucket"))
    desk.found(A)
    desk.store(A)
    assert desk.batches == []


def test_what_a_local_tier_had_is_offered_again_for_it_may_have_been_deleted() -> None:
    desk = Desk(tier(), tier(write="on-evict"))
    desk.found(A)
    desk.found(A, tier=1)
    desk.store(A)
    assert desk.asked(Verb.WRITE) == [[A]]
    assert desk.tiers[1].owed.keys() == {A}


def test_a_slot_stays_leased_until_its_write_has_ended() -> None:
    desk = Desk(tier(), slots=1)
    desk.store(A)
    assert desk.planner.reserve([B], desk.now, lossless=False) == {}
    desk.answer(desk.batch(Verb.WRITE), failed())
    assert list(desk.planner.reserve([B], desk.now, lossless=False)) == [B]


def test_a_lossless_caller_gets_only_what_the_queues_have_room_for() -> None:
    desk = Desk(tier(), slots=4)
    desk.tiers[0].write_limit = 2
    slots = desk.planner.reserve([A, B, C], desk.now, lossless=True)
    assert list(slots) == [A, B]
    assert not desk.planner.has_room(C, desk.now)


def test_a_lossless_caller_does_not_wait_for_a_tier_that_is_down() -> None:
    desk = Desk(tier(), slots=4)
    desk.tiers[0].write_limit = 1
    desk.store(A)
    desk.advance(1.0)  # its write hangs, and keeps its place in the queue
    assert not desk.planner.has_room(B, desk.now)
    desk.tiers[0].writes.breaker.trip(desk.now)
    assert desk.planner.has_room(B, desk.now)
    assert list(desk.planner.reserve([B], desk.now, lossless=True)) == [B]


def test_reserve_admits_as_many_as_fit_from_the_front() -> None:
    desk = Desk(slots=4)
    desk.store(A, B, C, D)
    wanted = [A, *KEYS[4:8]]  # A is there and stays
    assert list(desk.planner.reserve(wanted, desk.now, lossless=False)) == KEYS[4:7]


def test_an_overdue_write_keeps_its_lease_but_holds_up_no_flush() -> None:
    desk = Desk(tier())
    desk.store(A)
    batch, sequence = desk.batch(Verb.WRITE), desk.planner.write_sequence
    assert not desk.planner.settled(sequence)
    desk.advance(1.0)
    assert desk.abandoned == [batch] and desk.tiers[0].overdue == {A}
    assert desk.planner.settled(sequence)
    assert desk.catalog.leases(batch.slots[0]) == 1
    desk.answer(batch, CREATED)
    assert desk.catalog.leases(batch.slots[0]) == 0 and not desk.tiers[0].overdue


def test_flush_waits_only_for_what_was_queued_before() -> None:
    desk = Desk(tier())
    desk.store(A)
    sequence = desk.planner.write_sequence
    desk.store(B)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert desk.planner.settled(sequence)
    assert not desk.planner.settled(desk.planner.write_sequence)


# on-evict.


def test_on_evict_writes_nothing_at_first_and_cleans_near_the_cold_end() -> None:
    desk = Desk(tier(write="on-evict"), slots=8)
    desk.store(*KEYS[:7])
    assert desk.asked(Verb.WRITE) == [KEYS[:2]], "the coldest, before room runs out"


def test_what_a_tier_is_owed_waits_while_it_is_down() -> None:
    desk = Desk(tier(write="on-evict"), slots=8)
    desk.tiers[0].writes.breaker.trip(desk.now)
    desk.store(*KEYS[:7])
    assert desk.tiers[0].counters.dropped == 0
    assert desk.tiers[0].owed.keys() == set(KEYS[:7])
    desk.planner.wants_cleaning(desk.now)  # somebody needs the room, and waits
    assert desk.tiers[0].counters.dropped == 7 and not desk.tiers[0].owed


def test_a_dirty_victim_is_dropped_and_counted() -> None:
    desk = Desk(tier(write="on-evict"), slots=2)
    desk.tiers[0].write_limit = 0
    desk.store(A, B)
    desk.store(C)
    assert desk.tiers[0].counters.dropped == 1
    assert desk.tiers[0].owed.keys() == {B, C}


def test_a_lossless_caller_evicts_nothing_that_is_owed() -> None:
    desk = Desk(tier(write="on-evict"), slots=2)
    desk.tiers[0].write_limit = 0
    desk.store(A, B)
    assert desk.planner.reserve([C], desk.now, lossless=True) == {}
    assert not desk.planner.has_room(C, desk.now)
    desk.tiers[0].write_limit = 2
    desk.planner.wants_cleaning(desk.now)
    for batch in desk.advance():
        desk.answer(batch, CREATED)
    assert desk.planner.has_room(C, desk.now)


def test_what_two_tiers_are_owed_counts_once() -> None:
    remote = {"url": "s3://bucket", "write": "on-evict"}
    desk = Desk(tier(**remote), tier(**remote, name="cold"), slots=3)
    for state in desk.tiers:
        state.write_limit = 0
        state.presence.found(C, desk.now)
    desk.store(A)
    desk.store(C)
    desk.store(B)
    assert [state.owed.keys() for state in desk.tiers] == [{A, B}, {A, B}]
    assert desk.planner.has_room(D, desk.now), "C may go"


def test_close_pays_everything_that_is_owed() -> None:
    desk = Desk(tier(write="on-evict"), slots=8)
    desk.store(A, B)
    assert desk.batches == []
    desk.planner.pay_all(desk.now)
    desk.advance()
    assert desk.asked(Verb.WRITE) == [[A, B]]


# Deletion.


def test_delete_hides_the_chunk_at_once() -> None:
    desk = Desk(tier())
    desk.store(A)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    erasure = desk.planner.delete([A], desk.now)
    assert A not in desk.catalog.ready
    assert desk.fetch(A).missing == [A]
    assert desk.asked(Verb.DELETE) == [[A]] and not erasure.done
    desk.answer(desk.batch(Verb.DELETE), OK)
    assert erasure.done and not erasure.errors


def test_a_write_that_no_worker_has_yet_is_withdrawn() -> None:
    desk = Desk(tier(), slots=8, slice_items=1)
    desk.store(A, B, C)
    assert desk.asked(Verb.WRITE) == [[A], [B]]
    desk.planner.delete([C], desk.now)
    assert C not in desk.tiers[0].writing and desk.catalog.free == 6
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert desk.asked(Verb.DELETE) == [[C]]


def test_delete_follows_a_write_that_is_under_way() -> None:
    desk = Desk(tier())
    desk.store(A)
    erasure = desk.planner.delete([A], desk.now)
    desk.advance()
    assert desk.asked(Verb.DELETE) == []
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    desk.answer(desk.batch(Verb.DELETE), OK)
    assert erasure.done
    desk.catalog.audit()
    assert desk.catalog.free == 4


def test_delete_follows_a_write_that_hangs_when_it_answers_at_last() -> None:
    desk = Desk(tier())
    desk.store(A)
    write = desk.batch(Verb.WRITE)
    desk.advance(1.0)
    erasure = desk.planner.delete([A], desk.now)
    desk.advance()
    assert not erasure.done and desk.asked(Verb.DELETE) == []
    desk.answer(write, CREATED)
    assert desk.asked(Verb.DELETE) == [[A]]


def test_nothing_is_written_to_a_tier_while_it_deletes() -> None:
    desk = Desk(tier())
    desk.planner.delete([A], desk.now)
    desk.advance()
    desk.store(A)
    assert desk.asked(Verb.WRITE) == []


def test_a_key_whose_delete_failed_stays_hidden() -> None:
    desk = Desk(tier())
    desk.found(A)
    erasure = desk.planner.delete([A], desk.now)
    desk.advance()
    desk.answer(desk.batch(Verb.DELETE), failed())
    assert erasure.errors == [("disk", A, "it failed")]
    desk.found(A)
    assert desk.fetch(A).missing == [A]
    desk.planner.delete([A], desk.now)
    desk.advance()
    desk.answer(desk.batch(Verb.DELETE), OK)
    desk.found(A)
    desk.fetch(A)
    assert desk.asked(Verb.READ) == [[A]]


def test_two_deletes_of_a_key_share_one_request() -> None:
    desk = Desk(tier())
    erasures = [desk.planner.delete([A], desk.now) for _ in range(2)]
    desk.advance()
    assert desk.asked(Verb.DELETE) == [[A]]
    desk.answer(desk.batch(Verb.DELETE), OK)
    assert all(erasure.done for erasure in erasures)


def test_a_tier_that_may_not_be_written_is_not_asked_again_for_a_deleted_key() -> None:
    desk = Desk(tier(write="off"))
    desk.found(A)
    erasure = desk.planner.delete([A], desk.now)
    assert erasure.done and desk.advance() == []
    assert desk.fetch(A).missing == [A]


def test_it_hides_the_key_also_when_that_has_been_stored_again() -> None:
    """What it has may be what had to go."""
    desk = Desk(tier(write="off"))
    desk.found(A, B)
    desk.planner.delete([A], desk.now)
    desk.store(A)
    desk.planner.clear()
    assert desk.fetch(A, B).missing == [A]
    assert desk.asked(Verb.READ) == [[B]]


def test_it_hides_the_latest_of_many_deleted_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.planner.erase._MOST_HIDDEN", 2)
    desk = Desk(tier(write="off"))
    desk.found(A, B, C)
    for key in (A, B, A, C):
        desk.planner.delete([key], desk.now)
    assert list(desk.tiers[0].tombs) == [A, C]
    desk.fetch(A, B, C)
    assert desk.asked(Verb.READ) == [[B]]


def test_delete_from_a_tier_that_is_down_fails_at_once() -> None:
    desk = Desk(tier())
    desk.tiers[0].writes.breaker.trip(desk.now)
    erasure = desk.planner.delete([A], desk.now)
    assert erasure.done and erasure.errors == [("disk", A, "the tier is down")]


# Down, and up again.


@pytest.mark.parametrize("end", ["fails", "hangs"])
def test_a_failed_trial_lets_nothing_wait(end: str) -> None:
    desk = Desk(tier(), slots=12, slice_items=1)
    desk.tiers[0].writes.breaker.trip(desk.now)
    desk.advance(2.0)
    assert desk.tiers[0].writes.breaker.state(desk.now) is BreakerState.HALF_OPEN
    desk.store(A, B, C)
    assert desk.asked(Verb.WRITE) == [[A]], "one trial"
    if end == "fails":
        desk.answer(desk.batch(Verb.WRITE), failed())
    else:
        desk.advance(1.0)
    assert desk.tiers[0].writes.breaker.state(desk.now) is BreakerState.OPEN
    assert desk.tiers[0].writing.keys() == desk.tiers[0].overdue
    assert desk.tiers[0].counters.dropped == 2
    assert not [event for event in desk.events() if event.kind == "tier-down"], "it was down before"


def test_a_good_trial_lets_the_rest_through() -> None:
    desk = Desk(tier(), slots=12, slice_items=1)
    desk.tiers[0].writes.breaker.trip(desk.now)
    desk.advance(2.0)
    desk.store(A, B, C)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    assert desk.asked(Verb.WRITE) == [[B], [C]]
    assert [event.kind for event in desk.events()].count("tier-up") == 1


def test_reads_go_on_while_writes_are_down() -> None:
    desk = Desk(tier())
    desk.tiers[0].writes.breaker.trip(desk.now)
    desk.found(A)
    desk.fetch(A)
    assert desk.asked(Verb.READ) == [[A]]


def test_an_answer_older_than_a_delete_does_not_keep_a_new_chunk_from_the_tier() -> None:
    desk = Desk(tier())
    desk.planner.lookup([A], desk.now)
    desk.advance()
    probe = desk.batch(Verb.PROBE)
    erasure = desk.planner.delete([A], desk.now)
    desk.advance()
    desk.answer(desk.batch(Verb.DELETE), Result(Status.OK))
    assert erasure.done
    desk.answer(probe, Result(Status.OK))
    desk.store(A)
    assert desk.asked(Verb.WRITE) == [[A]]


def test_promotions_take_no_room_from_those_who_store() -> None:
    desk = Desk(tier(), slots=4)
    desk.tiers[0].write_limit = 2
    desk.found(A, B)
    desk.fetch(A, B)
    assert desk.planner.promoting == 2
    assert desk.planner.has_room(C, desk.now)
    assert list(desk.planner.reserve([C, D], desk.now, lossless=True)) == [C, D]
