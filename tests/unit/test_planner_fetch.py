"""Promotion, decided without I/O: order, waves, tiers, deadlines, single-flight."""

from __future__ import annotations

from typing import Any

import pytest
from planning import OK, Desk, failed

from kvstore.catalog import SlotState
from kvstore.config import TierConfig
from kvstore.engine.base import Result, Status, Verb
from kvstore.planner import Fetch, Lookup
from kvstore.presence import Known
from support.chunks import chunk_key

KEYS = [chunk_key(number) for number in range(12)]
A, B, C, D, E, F = KEYS[:6]


def tier(**options: Any) -> TierConfig:
    return TierConfig(url="memory://x", **{"workers": 1, "timeout": 1.0, "write": "off", **options})


def test_look_ups_probe_once_and_remember() -> None:
    desk = Desk(tier())
    assert desk.planner.lookup([A, B, A], desk.now) == [Lookup.RETRY] * 3
    assert desk.planner.lookup([A], desk.now) == [Lookup.RETRY]
    (batch,) = desk.advance()
    assert (batch.verb, batch.keys) == (Verb.PROBE, [A, B])
    desk.answer(batch, OK, failed(Status.MISSING))
    assert desk.planner.lookup([A, B], desk.now) == [Lookup.PENDING, Lookup.MISS]
    assert desk.advance() == []


def test_a_remembered_absence_ages_though_only_look_ups_come() -> None:
    desk = Desk(tier())
    desk.planner.lookup([A], desk.now)
    (batch,) = desk.advance()
    desk.answer(batch, failed(Status.MISSING))
    assert desk.planner.lookup([A], desk.now) == [Lookup.MISS]
    desk.advance(20.0)
    assert desk.planner.lookup([A], desk.now) == [Lookup.RETRY]


def test_a_key_is_asked_of_one_tier_after_the_other() -> None:
    desk = Desk(tier(), tier(read=False), tier())
    desk.planner.lookup([A], desk.now)
    (first,) = desk.advance()
    (second,) = desk.answer(first, failed(Status.MISSING))
    assert (first.tier, second.tier) == (0, 2), "what may not be read is not asked"
    desk.answer(second, OK)
    assert desk.planner.lookup([A], desk.now) == [Lookup.PENDING]


def test_chunks_of_one_request_come_from_different_tiers() -> None:
    desk = Desk(tier(), tier(), slots=8)
    desk.found(A, C, tier=0)
    desk.found(B, D, tier=1)
    fetch = desk.fetch(A, B, C, D)
    assert [(batch.tier, batch.keys) for batch in desk.batches] == [(0, [A, C]), (1, [B, D])]
    for batch in list(desk.batches):
        desk.answer(batch, OK)
    assert fetch.done and sorted(fetch.promoted) == [A, B, C, D]
    told = [(event.kind, event.keys) for event in desk.events()]
    assert told == [("promoted", (A, C)), ("promoted", (B, D))]


def test_a_key_that_fails_on_one_tier_is_asked_of_the_next() -> None:
    desk = Desk(tier(), tier())
    desk.found(A, tier=0)
    desk.found(A, tier=1)
    fetch = desk.fetch(A)
    desk.answer(desk.batch(Verb.READ), failed(Status.CORRUPT))
    assert desk.tiers[0].presence.get(A) is Known.ABSENT
    assert desk.tiers[0].counters.corrupt == 1
    assert [event.kind for event in desk.events()] == ["corrupt"]
    desk.answer(desk.batch(Verb.READ, tier=1), OK)
    assert fetch.promoted == [A]


def test_failed_keys_are_asked_of_the_next_tier_in_the_order_of_the_request() -> None:
    desk = Desk(tier(), tier(), slots=16)
    for number in (0, 1):
        desk.found(*KEYS[:6], tier=number)
    desk.fetch(*KEYS[:6])
    desk.answer(desk.batch(Verb.READ), failed())
    assert desk.asked(Verb.READ) == [KEYS[:6]]


def test_a_fetch_goes_on_from_the_front_when_keys_come_back_into_it() -> None:
    desk = Desk(tier(), tier(), slots=4)  # two promotions at a time
    for number in (0, 1):
        desk.found(*KEYS[:4], tier=number)
    desk.fetch(A, B, C, D)
    desk.answer(desk.batch(Verb.READ), failed(), failed())
    assert desk.asked(Verb.READ) == [[A, B]]
    assert desk.batch(Verb.READ, tier=1).keys == [A, B]


def test_promotions_stay_within_their_budget_in_key_order() -> None:
    desk = Desk(tier(), slots=8)  # so that the budget is 4
    desk.found(*KEYS[:8])
    desk.fetch(*KEYS[:8])
    assert desk.asked(Verb.READ) == [KEYS[:4]]
    desk.answer(desk.batch(Verb.READ), OK, OK)
    assert desk.planner.promoting == 4
    assert desk.asked(Verb.READ) == [KEYS[:4], KEYS[4:6]]


def test_a_turn_plans_a_batch_for_each_worker() -> None:
    desk = Desk(tier(workers=2), slots=24, slice_items=2)
    desk.found(*KEYS[:10])
    fetch = desk.fetch(*KEYS[:10])
    assert desk.asked(Verb.READ) == [KEYS[:2], KEYS[2:4]]
    assert desk.planner.resting and desk.planner.next_deadline <= desk.now, "the next turn is due"
    desk.advance()
    assert desk.asked(Verb.READ)[2:] == [KEYS[4:6], KEYS[6:8]], "they go on without waiting for anybody"
    desk.advance()
    assert desk.asked(Verb.READ)[4:] == [], "that is what workers may have"
    assert not desk.planner.resting and not fetch.todo
    while desk.batches:
        desk.answer(desk.batches[0], OK)
    assert fetch.promoted == KEYS[:10]


def test_nobody_gets_more_than_his_share_because_others_are_busy() -> None:
    desk = Desk(tier(workers=4), slots=48, slice_items=16)
    for key in KEYS[:3]:
        desk.planner.lookup([key], desk.now)
        desk.advance()
    desk.found(*KEYS[4:12])
    desk.fetch(*KEYS[4:12])
    assert [len(keys) for keys in desk.asked(Verb.READ)] == [2, 2, 2, 2]


def test_who_rests_keeps_nobody_waiting_and_comes_before_who_came_later() -> None:
    desk = Desk(tier(), tier(), slots=24, slice_items=2)
    desk.found(*KEYS[:6])
    desk.found(*KEYS[6:8], tier=1)
    long, short = desk.fetch(*KEYS[:6]), desk.fetch(*KEYS[6:8])
    assert not short.todo and [key in long.todo for key in KEYS[:6]] == [False] * 4 + [True] * 2
    desk.advance()
    assert not long.todo


def test_who_rests_can_be_cancelled() -> None:
    desk = Desk(tier(), slots=24, slice_items=2)
    desk.found(*KEYS[:6])
    fetch = desk.fetch(*KEYS[:6])
    desk.planner.cancel(fetch)
    desk.advance()
    assert not desk.planner.resting
    desk.answer(desk.batch(Verb.READ), OK)
    assert (fetch.promoted, fetch.skipped) == (KEYS[:2], KEYS[2:6])
    assert not desk.batches


def test_waves_never_evict_what_the_same_job_has_promoted() -> None:
    desk = Desk(tier(), slots=4)
    desk.found(*KEYS[:10])
    fetch = desk.fetch(*KEYS[:10])
    while desk.batches:
        desk.answer(desk.batches[0], OK)
    assert fetch.promoted == KEYS[:4]
    assert fetch.skipped == KEYS[4:10]
    assert set(desk.catalog.ready) == set(KEYS[:4])


def test_one_transfer_serves_everybody_who_asks() -> None:
    desk = Desk(tier())
    desk.found(A)
    fetches = [desk.fetch(A) for _ in range(3)]
    assert desk.asked(Verb.READ) == [[A]]
    desk.answer(desk.batch(Verb.READ), OK)
    assert all(fetch.promoted == [A] for fetch in fetches)


def test_a_fetch_waits_for_what_a_caller_is_filling() -> None:
    desk = Desk(tier())
    slots = desk.planner.reserve([A], desk.now, lossless=False)
    fetch = desk.fetch(A)
    assert not fetch.done and not desk.batches
    desk.planner.commit([(A, slots[A], 5)], desk.now)
    assert fetch.skipped == [A]


def test_a_fetch_looks_in_the_tiers_when_the_caller_aborts() -> None:
    desk = Desk(tier())
    desk.found(A)
    slots = desk.planner.reserve([A], desk.now, lossless=False)
    fetch = desk.fetch(A)
    desk.planner.abort([(A, slots[A])], desk.now)
    desk.advance()
    desk.answer(desk.batch(Verb.READ), OK)
    assert fetch.promoted == [A]


@pytest.mark.parametrize("result", [OK, failed()])
def test_a_delete_in_between_strands_nobody(result: Result) -> None:
    desk = Desk(tier(write="through"))
    desk.found(A)
    first = desk.fetch(A)
    read = desk.batch(Verb.READ)
    desk.planner.delete([A], desk.now)
    desk.advance()
    desk.answer(desk.batch(Verb.DELETE), OK)
    desk.found(A)  # another instance has stored it again
    second = desk.fetch(A)
    desk.answer(read, result)
    while desk.batches:
        desk.answer(desk.batches[0], OK)
    assert first.done and second.done
    desk.catalog.audit()


def test_only_a_caller_evicts() -> None:
    desk = Desk(tier(), slots=2)
    desk.store(A, B)
    desk.found(C)
    job = desk.fetch(C)  # the first look is a caller's
    assert desk.asked(Verb.READ) == [[C]]
    desk.answer(desk.batch(Verb.READ), OK)
    assert job.promoted == [C] and desk.planner.promoting == 0
    desk.found(D)
    other = Fetch([D])
    desk.planner.fetch(other, desk.now)
    desk.advance(may_evict=False)
    assert not desk.batches and not other.done
    desk.advance(may_evict=True)
    assert desk.asked(Verb.READ) == [[D]]


def test_a_fetch_waits_for_slots_that_writes_give_back() -> None:
    desk = Desk(tier(write="through"), slots=1)
    desk.store(A)
    desk.found(B)
    fetch = desk.fetch(B)
    assert not fetch.done
    desk.answer(desk.batch(Verb.WRITE), OK)
    assert desk.asked(Verb.READ) == [[B]]


def test_a_fetch_does_not_wait_for_a_write_that_hangs() -> None:
    desk = Desk(tier(write="through"), slots=1)
    desk.store(A)
    desk.found(B)
    desk.advance(1.0)
    assert desk.tiers[0].overdue == {A}
    assert desk.fetch(B).skipped == [B]


def test_a_cancelled_fetch_starts_nothing_more() -> None:
    desk = Desk(tier(), tier(), slots=8)
    for number in (0, 1):
        desk.found(*KEYS[:8], tier=number)
    fetch = desk.fetch(*KEYS[:8])
    desk.planner.cancel(fetch)
    assert not fetch.done, "four are under way"
    desk.answer(desk.batch(Verb.READ), OK, OK, failed(), failed())
    assert fetch.done and desk.batches == []
    assert fetch.promoted == KEYS[:2] and sorted(fetch.skipped) == KEYS[2:8]


def test_a_slot_past_its_deadline_is_set_aside_until_the_worker_answers() -> None:
    desk = Desk(tier())
    desk.found(A)
    fetch = desk.fetch(A)
    batch = desk.batch(Verb.READ)
    desk.advance(1.0)
    assert desk.abandoned == [batch]
    assert fetch.missing == [A] and desk.planner.promoting == 0
    assert desk.catalog.state(batch.slots[0]) is SlotState.QUARANTINED
    desk.answer(batch, OK)
    assert desk.catalog.free == 4 and A not in desk.catalog.ready


def test_only_unanswered_items_of_an_overdue_batch_are_given_up() -> None:
    desk = Desk(tier(), slots=8)
    desk.found(A, B, C)
    fetch = desk.fetch(A, B, C)
    batch = desk.batch(Verb.READ)
    desk.answer(batch, OK, OK)
    desk.advance(1.0)
    assert (fetch.promoted, fetch.missing) == ([A, B], [C])
    desk.answer(batch, OK, first=2)
    desk.catalog.audit()
    assert desk.catalog.quarantined == 0


def test_an_answer_counts_once() -> None:
    desk = Desk(tier())
    desk.found(A)
    desk.fetch(A)
    batch = desk.batch(Verb.READ)
    desk.answer(batch, OK)
    desk.answer(batch, failed())
    assert desk.planner.promoting == 0 and A in desk.catalog.ready


def test_the_first_read_of_a_promoted_chunk_is_no_second_hit() -> None:
    desk = Desk(tier())
    desk.found(A)
    desk.fetch(A)
    desk.answer(desk.batch(Verb.READ), OK)
    for _ in range(2):
        held, _ = desk.planner.read([A])
        desk.planner.drop(list(held.values()))
    counts = desk.planner.host_snapshot()
    assert (counts["hits"], counts["misses"]) == (1, 1)


def test_who_gets_a_promoted_chunk_has_read_it() -> None:
    desk = Desk(tier())
    desk.found(A)
    fetch = desk.fetch(A, hold=True)
    desk.answer(desk.batch(Verb.READ), OK)
    desk.planner.drop(list(fetch.held.values()))
    desk.planner.read([A])
    assert desk.planner.host_snapshot()["hits"] == 1


def test_a_long_request_asks_where_its_keys_are_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tier(), slots=4)
    keys = [number.to_bytes(16) for number in range(4000)]
    looks = 0
    where = desk.planner._locator.where

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return where(*arguments)

    monkeypatch.setattr(desk.planner._locator, "where", counted)
    desk.fetch(*keys)
    while desk.asked(Verb.PROBE):
        desk.answer(desk.batch(Verb.PROBE), failed(Status.MISSING))
    assert looks < 6 * len(keys)
