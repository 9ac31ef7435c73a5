"""Writes to a tier whose limits are shared, decided without I/O: the test is the collector."""

from __future__ import annotations

import pytest
from planning import Desk, failed

from kvstore.collect.limits import GRANT_SECONDS
from kvstore.collect.report import Answer, Report
from kvstore.config import TierConfig
from kvstore.engine.base import Completion, Result, Status, Verb
from kvstore.frame import object_size
from support.chunks import CHUNK, chunk_key

A, B, C, D = (chunk_key(number) for number in range(4))
SIZE = object_size(CHUNK)
CREATED = Result(Status.OK, 1)
FILE, BUCKET = "file:///x", "s3://bucket/x"


def open_desk(url: str, timeout: float = 10.0) -> Desk:
    config = TierConfig(url=url, capacity=1000 * SIZE, workers=1, timeout=timeout, read=False)
    return Desk(config, slots=8)


def report(desk: Desk) -> Report:
    """What the collector is told."""
    return Report.unpack(desk.batch(Verb.COLLECT, 1).keys[0])


def answer(desk: Desk, granted: int, *, more: bool = False, seconds: float = 0.0) -> None:
    """The collector answers."""
    batch = desk.batch(Verb.COLLECT, 1)
    rows = Answer(granted, 0, 0, more).rows()
    desk.planner.apply(Completion(batch.id, 0, [], rows, {}), desk.now)
    desk.answer(batch, Result(Status.OK, granted, seconds))


def is_asked(desk: Desk) -> bool:
    return any(batch.verb is Verb.COLLECT for batch in desk.batches)


def until_asked(desk: Desk) -> float:
    """Seconds until the next question."""
    began = desk.now
    while not is_asked(desk):
        assert desk.now - began < 60
        desk.advance(0.01)
    return desk.now - began


@pytest.mark.parametrize("url", [FILE, BUCKET])
def test_a_write_waits_for_its_grant(url: str) -> None:
    desk = open_desk(url)
    desk.store(A)
    assert desk.asked(Verb.WRITE) == []
    assert (report(desk).least, report(desk).needed) == (SIZE, SIZE)
    answer(desk, 2 * SIZE)
    assert desk.asked(Verb.WRITE) == [[A]]
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    answer(desk, 0)  # to a question that came before
    until_asked(desk)
    assert (report(desk).created, report(desk).created_bytes, report(desk).claimed) == (1, SIZE, SIZE)


@pytest.mark.parametrize(("url", "counted"), [(FILE, 0), (BUCKET, 1)])
def test_what_failed_may_be_in_a_bucket_all_the_same(url: str, counted: int) -> None:
    """The answer may have been lost on its way: too much is counted, and the next survey finds out."""
    desk = open_desk(url)
    desk.store(A)
    answer(desk, 2 * SIZE)
    desk.answer(desk.batch(Verb.WRITE), failed())
    tally = desk.tiers[0].tally
    assert tally is not None
    assert (tally.created, tally.created_bytes, tally.unsure) == (counted, counted * SIZE, counted)


@pytest.mark.parametrize(("url", "seconds"), [(FILE, 0.03), (BUCKET, 0.15)])
def test_a_refusal_is_no_reason_to_ask_all_the_time(url: str, seconds: float) -> None:
    desk = open_desk(url)
    desk.store(A)
    answer(desk, 0)
    assert until_asked(desk) == pytest.approx(seconds, abs=0.02)


def test_stores_of_a_bucket_ask_less_often_when_answers_take_long() -> None:
    desk = open_desk(BUCKET)
    desk.store(A)
    answer(desk, 0, seconds=1.5)
    assert until_asked(desk) == pytest.approx(1.5, abs=0.02)


@pytest.mark.parametrize(("url", "written"), [(FILE, [[B]]), (BUCKET, [])])
def test_a_grant_in_a_bucket_is_not_used_after_a_long_stop(url: str, written: list[list[bytes]]) -> None:
    """Others may have given up a store that was stopped, and counted what it was granted as written."""
    desk = open_desk(url)
    desk.store(A)
    answer(desk, 3 * SIZE)
    desk.answer(desk.batch(Verb.WRITE), CREATED)
    desk.now += GRANT_SECONDS + 1
    desk.store(B)
    assert desk.asked(Verb.WRITE) == written
    answer(desk, 0)  # to a question that came before
    until_asked(desk)
    assert report(desk).least == (0 if written else SIZE)


@pytest.mark.parametrize("url", [FILE, BUCKET])
def test_what_waits_in_vain_is_dropped(url: str) -> None:
    desk = open_desk(url)
    desk.store(A)
    while desk.tiers[0].counters.dropped == 0:
        assert desk.now < 5
        if is_asked(desk):
            answer(desk, 0)
        desk.advance(0.05)
    assert desk.asked(Verb.WRITE) == []
    until_asked(desk)
    answer(desk, 2 * SIZE)
    desk.store(C)
    assert desk.asked(Verb.WRITE) == [[C]], "it begins again"


def test_what_cannot_be_asked_is_dropped() -> None:
    desk = open_desk(BUCKET)
    desk.store(A)
    for _ in range(20):
        if is_asked(desk):
            desk.answer(desk.batch(Verb.COLLECT, 1), failed())
        desk.advance(0.3)
    assert desk.asked(Verb.WRITE) == []
    assert desk.tiers[0].counters.dropped == 1


def test_what_was_collected_is_an_event() -> None:
    desk = open_desk(BUCKET)
    desk.found(D)
    desk.store(A)
    batch = desk.batch(Verb.COLLECT, 1)
    rows = Answer(SIZE, 0, 0, False, [(D, SIZE, 1.0)]).rows()
    desk.planner.apply(Completion(batch.id, 0, [], rows, {}), desk.now)
    desk.answer(batch, Result(Status.OK, SIZE))
    assert [event.keys for event in desk.events() if event.kind == "removed"] == [(D,)]
