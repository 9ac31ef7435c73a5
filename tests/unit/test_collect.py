"""The collector, turn by turn, over real directories; and a store that shares one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backends import BackendContext, StoredObject
from kvstore.backends.posix import PosixBackend
from kvstore.collect.collector import Collector
from kvstore.collect.directory import LEAD, DirectoryBooks
from kvstore.collect.limits import Limits
from kvstore.collect.report import Answer, Report, Row
from support.chunks import chunk_key
from support.world import is_idle, wait_for

CHUNK = 4096
SIZE = 2 * CHUNK  # on storage
ONE, TWO = b"1" * 8, b"2" * 8
STALE = 1_000_000.0


class Rig:
    """A directory, and collectors over it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "space")
        self.backend = PosixBackend(BackendContext(bytes(16), b"manifest", CHUNK), self.path)
        self.backend.open()
        self.books = DirectoryBooks(self.path)
        self._collectors: list[Collector] = []

    def collector(self, capacity: int | None, ttl: float | None = None, **options: Any) -> Collector:
        books = DirectoryBooks(self.path, seconds=options.pop("seconds", 0.05))
        collector = Collector(self.backend, books, Limits(capacity, None, ttl, SIZE), **options)
        self._collectors.append(collector)
        return collector

    def write(self, *numbers: int, age: float = 0.0) -> None:
        for number in numbers:
            self.backend.write(chunk_key(number), memoryview(bytes(CHUNK)))
            if age:
                self.age(number, age)

    def age(self, number: int, seconds: float) -> None:
        key = chunk_key(number).hex()
        when = time.time() - seconds
        os.utime(f"{self.path}/{key[:2]}/{key}.kv", (when, when))

    def left(self) -> set[int]:
        there = {found.key for found in self.backend.scan()}
        return {number for number in range(200) if chunk_key(number) in there}

    def close(self) -> None:
        for collector in self._collectors:
            collector.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def until_done(collector: Collector, report: Report) -> Answer:
    removed: list[Row] = []
    for _ in range(100):
        answer = collector.turn(report)
        removed += answer.removed
        if not answer.more:
            return answer._replace(removed=removed)
    raise AssertionError("it does not come to an end")


def test_the_first_turn_counts_what_is_there(rig: Rig) -> None:
    rig.write(*range(5))
    answer = rig.collector(100 * SIZE).turn(Report(ONE, least=SIZE, needed=SIZE, wanted=3 * SIZE))
    assert answer == (3 * SIZE, 5 * SIZE, 5, False, [])


def test_the_next_instance_need_not_count(rig: Rig) -> None:
    rig.write(*range(5))
    first = rig.collector(100 * SIZE)
    first.turn(Report(ONE))
    first.turn(Report(ONE, leaving=True))
    os.unlink(f"{rig.path}/{chunk_key(0).hex()[:2]}/{chunk_key(0).hex()}.kv")  # a listing would see it
    assert rig.collector(100 * SIZE).turn(Report(TWO)).chunks == 5


def test_from_the_high_watermark_to_the_low_one(rig: Rig) -> None:
    rig.write(*range(40), age=100)
    rig.write(*range(40, 97))
    answer = until_done(rig.collector(100 * SIZE), Report(ONE))
    assert len(answer.removed) == 7
    assert (answer.size, answer.chunks) == (90 * SIZE, 90)
    assert rig.left() >= set(range(40, 97)), "the least recently used go"


def test_no_more_than_is_needed(rig: Rig) -> None:
    rig.write(*range(94))
    collector = rig.collector(100 * SIZE)
    assert until_done(collector, Report(ONE, needed=4 * SIZE, wanted=4 * SIZE)).removed == []
    rig.write(94, 95)
    answer = until_done(collector, Report(ONE, 2, 2 * SIZE, claimed=4 * SIZE, needed=SIZE, wanted=SIZE))
    assert len(answer.removed) == 6  # 96 were there, one more than the high watermark
    assert answer.granted == SIZE


def test_what_was_used_since_the_survey_stays(rig: Rig) -> None:
    rig.write(*range(4), age=STALE)
    rig.write(4, 5, age=STALE / 2)
    collector = rig.collector(6 * SIZE)
    until_done(collector, Report(ONE, least=SIZE, needed=SIZE, wanted=SIZE))
    used = rig.left() - {4, 5}
    assert len(used) == 3
    for number in used:
        rig.age(number, 1)
    until_done(collector, Report(ONE, claimed=SIZE, least=SIZE, needed=SIZE, wanted=SIZE))
    assert rig.left() > used
    assert len(rig.left()) == 4


def test_a_read_counts_as_use(rig: Rig) -> None:
    rig.write(0, 1, age=STALE)
    out = memoryview(bytearray(CHUNK))
    assert rig.backend.read_into(chunk_key(0), out) == CHUNK
    until_done(rig.collector(SIZE), Report(ONE))
    assert rig.left() == {0}


def test_one_collects_at_a_time(rig: Rig) -> None:
    rig.write(*range(100))
    other = rig.books.lock(LEAD)
    with rig.books.edit() as accounts:
        accounts.counted, accounts.size, accounts.chunks = True, 100 * SIZE, 100
    assert other.acquire()
    collector = rig.collector(100 * SIZE)
    answer = collector.turn(Report(ONE, least=SIZE, needed=SIZE, wanted=SIZE))
    assert (answer.granted, answer.removed, len(rig.left())) == (0, [], 100), "stores, never space"
    other.release()
    assert until_done(collector, Report(ONE, least=SIZE, needed=SIZE, wanted=SIZE)).granted == SIZE
    assert other.acquire(), "nothing to do: the lock is free"


def test_expiry(rig: Rig) -> None:
    rig.write(*range(10), age=1000)
    rig.write(*range(10, 15), age=50)
    collector = rig.collector(None, ttl=100.0)
    assert len(until_done(collector, Report(ONE)).removed) == 10
    assert rig.left() == set(range(10, 15))
    rig.age(12, 1000)
    with rig.books.edit() as accounts:
        accounts.oldest = time.time() - 1000
    assert len(until_done(rig.collector(None, ttl=100.0), Report(TWO)).removed) == 1


def test_a_listing_is_made_a_little_at_a_time(rig: Rig) -> None:
    rig.write(*range(150))
    collector = rig.collector(100 * SIZE, seconds=0.0)
    answer = collector.turn(Report(ONE, least=SIZE, needed=SIZE, wanted=SIZE))
    assert (answer.granted, answer.more) == (0, True)
    assert until_done_slowly(collector) == (90 * SIZE, 90)


def until_done_slowly(collector: Collector) -> tuple[int, int]:
    collector._books.seconds = 0.001
    answer = until_done(collector, Report(ONE))
    return answer.size, answer.chunks


def test_more_victims_than_a_survey_remembers(rig: Rig) -> None:
    rig.write(*range(100), age=100)
    answer = until_done(rig.collector(40 * SIZE, most=8), Report(ONE))
    assert (answer.chunks, len(rig.left())) == (36, 36)


def test_a_collector_that_died_at_work_makes_the_next_one_look(rig: Rig) -> None:
    rig.write(*range(50))
    with rig.books.edit() as accounts:
        accounts.counted, accounts.deleting = True, True
        accounts.size, accounts.chunks = 99 * SIZE, 99  # it had deleted the others
    answer = until_done(rig.collector(100 * SIZE), Report(ONE))
    assert (answer.chunks, answer.size, answer.removed) == (50, 50 * SIZE, [])


def test_those_who_keep_to_different_capacities_are_told_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    first, same = (rig.collector(100 * SIZE, place="file:///kv") for _ in range(2))
    first.turn(Report(ONE))
    same.turn(Report(TWO))
    assert not caplog.records
    same.turn(Report(TWO, leaving=True))
    other = rig.collector(50 * SIZE, place="file:///kv")
    for _ in range(2):
        first.turn(Report(ONE))
        other.turn(Report(TWO))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and texts[0] == texts[1], "each of them once"
    assert texts[0].startswith("file:///kv: stores here have different capacities, 400KiB, 800KiB")


def test_the_capacity_of_the_dead_is_nobodys(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    dead = rig.collector(50 * SIZE)
    dead.turn(Report(ONE))
    dead.close()  # as the kernel does it
    rig.collector(100 * SIZE).turn(Report(TWO))
    assert not caplog.records


def test_the_forgotten_are_granted_nothing_before_a_survey(rig: Rig) -> None:
    rig.write(*range(150))
    with rig.books.edit() as accounts:
        accounts.counted, accounts.size, accounts.chunks = True, 20 * SIZE, 20
    collector = rig.collector(200 * SIZE, seconds=0.0)
    report = Report(ONE, 170, 170 * SIZE, 20, 20 * SIZE, wanted=SIZE)
    answer = collector.turn(report)
    assert (answer.granted, answer.size, answer.more) == (0, 20 * SIZE, True)
    answer = until_done(collector, report)
    assert (answer.granted, answer.size, answer.chunks) == (SIZE, 150 * SIZE, 150)


def test_a_survey_that_may_have_missed_a_strangers_objects_is_followed_by_another(rig: Rig) -> None:
    """The books have been lost, and meanwhile somebody writes what was granted before."""
    rig.write(*range(150))
    collector = rig.collector(1000 * SIZE, seconds=0.0)
    assert collector.turn(Report(ONE)).more
    with rig.books.edit() as accounts:
        accounts.enter(Report(TWO, 1, SIZE))
    collector._books.seconds = 60.0
    assert collector.turn(Report(ONE, wanted=SIZE)).granted == 0
    rig.write(150)  # stands for one where the listing had been before
    answer = until_done(collector, Report(ONE, wanted=SIZE))
    assert (answer.granted, answer.chunks) == (SIZE, 151)


def test_what_could_not_be_surveyed_is_not_granted(rig: Rig) -> None:
    rig.write(*range(10))
    collector, scan = rig.collector(10 * SIZE), rig.backend.scan

    def break_off() -> Iterator[StoredObject]:
        yield from scan()
        raise OSError("no answer")

    rig.backend.scan = break_off  # type: ignore[method-assign]
    report = Report(ONE, least=SIZE, needed=SIZE, wanted=SIZE)
    for _ in range(2):
        with pytest.raises(OSError, match="no answer"):
            collector.turn(report)
    rig.backend.scan = scan  # type: ignore[method-assign]
    answer = until_done(collector, report)
    assert (answer.granted, answer.chunks, len(rig.left())) == (SIZE, 9, 9)


def test_deleting_one_by_one_ends_with_the_turn(rig: Rig) -> None:
    """A slow server that refuses batches: every turn gets on, and looks at the clock."""
    rig.write(*range(8))
    collector = rig.collector(4 * SIZE)
    delete, asked = rig.backend.delete, []

    def delete_slowly(keys: Sequence[bytes]) -> None:
        asked.append(len(keys))
        time.sleep(collector._books.seconds)
        if len(keys) > 1:
            raise OSError("no batches here")
        delete(keys)

    rig.backend.delete = delete_slowly  # type: ignore[method-assign]
    requests, more = [], True
    while more:
        before = len(asked)
        more = collector.turn(Report(ONE)).more
        requests.append(len(asked) - before)
    assert asked == [4, 1, 3, 1, 2, 1, 1]
    assert max(requests) == 2
    assert len(rig.left()) == 4


def test_a_namespace_that_vanishes(rig: Rig) -> None:
    rig.write(*range(96))
    collector = rig.collector(100 * SIZE)
    for number in range(96):
        key = chunk_key(number).hex()
        os.unlink(f"{rig.path}/{key[:2]}/{key}.kv")
    with rig.books.edit() as accounts:
        accounts.counted, accounts.size, accounts.chunks = True, 96 * SIZE, 96
    assert until_done(collector, Report(ONE))[1:3] == (0, 0)


# With a store on top.


@pytest.fixture(params=["threads", "processes", "inline"])
def engine(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def open_store(folder: Path, engine: str, options: str) -> kvstore.Store:
    return kvstore.open(
        f"ram://?capacity={64 * CHUNK}&pin=off",
        f"file://{folder}/kv?{options}",
        chunk_size=CHUNK,
        engine=engine,
    )


def test_a_store_keeps_to_its_capacity_and_says_what_went(tmp_path: Path, engine: str) -> None:
    with open_store(tmp_path, engine, f"capacity={40 * SIZE}B") as store:
        for number in range(100):
            store.put(chunk_key(number), bytes(CHUNK))
        assert store.flush(timeout=20)
        wait_for(lambda: is_idle(store))
        tier = store.stats().tiers[1]
        assert (tier.writes, tier.dropped, tier.errors) == (100, 0, 0)
        assert tier.evictions >= 60
        there = {path.stem for path in (tmp_path / "kv").rglob("*.kv")}
        assert 30 <= len(there) <= 40
        gone = {key.hex() for event in store.events() if event.kind == "removed" and event.source == tier.name
                for key in event.keys}  # fmt: skip
        assert gone == {chunk_key(number).hex() for number in range(100)} - there
    (books,) = ((DirectoryBooks(str(path))) for path in (tmp_path / "kv").iterdir())
    accounts = books.read()
    assert accounts is not None
    assert (accounts.chunks, accounts.size) == (len(there), len(there) * SIZE)
    assert (accounts.members, accounts.doubtful) == ({}, False)


def test_the_next_store_goes_on_with_the_books(tmp_path: Path, engine: str) -> None:
    options = f"capacity={400 * SIZE}B"
    with open_store(tmp_path, engine, options) as store:
        store.put_many({chunk_key(number): bytes(CHUNK) for number in range(20)})
    with open_store(tmp_path, engine, options) as store:
        store.put(chunk_key(99), bytes(CHUNK))
        assert store.flush(timeout=20)
        assert store.get(chunk_key(3))
        store.delete([chunk_key(3)])
    (books,) = ((DirectoryBooks(str(path))) for path in (tmp_path / "kv").iterdir())
    accounts = books.read()
    assert accounts is not None
    assert (accounts.chunks, accounts.size) == (20, 20 * SIZE)
    assert accounts.turnover.created == 21


def test_what_one_store_collects_is_a_miss_to_another(tmp_path: Path) -> None:
    options = f"capacity={40 * SIZE}B"
    with open_store(tmp_path, "threads", options) as one, open_store(tmp_path, "threads", options) as other:
        one.put_many({chunk_key(number): bytes([number]) * CHUNK for number in range(30)})
        assert one.flush(timeout=20)
        keys = [chunk_key(number) for number in range(30)]
        assert all(other.prefetch([key]).result(20).promoted for key in keys[:3])
        wait_for(lambda: kvstore.Lookup.RETRY not in other.lookup(keys), other)  # it remembers where they are
        one.put_many({chunk_key(number): bytes([number]) * CHUNK for number in range(100, 130)})
        assert one.flush(timeout=20)
        found = other.get_many(keys)
        assert 0 < len(found) < 30
        assert all(data == key[:1] * CHUNK for key, data in found.items())


def test_without_room_stores_are_dropped_and_loads_go_on(tmp_path: Path) -> None:
    with open_store(tmp_path, "threads", f"capacity={10 * SIZE}B&timeout=400ms") as store:
        store.put_many({chunk_key(number): bytes([number]) * CHUNK for number in range(10)})
        assert store.flush(timeout=20)
        (space,) = (tmp_path / "kv").iterdir()
        stuck = DirectoryBooks(str(space)).lock(LEAD)
        assert stuck.acquire()
        for number in range(10, 15):
            store.put(chunk_key(number), bytes([number]) * CHUNK)
        assert store.flush(timeout=20)
        assert store.stats().tiers[1].dropped == 5
        assert len(list(space.rglob("*.kv"))) == 10
        stuck.release()
        deadline = time.monotonic() + 20
        while store.stats().tiers[1].writes == 10:
            assert time.monotonic() < deadline, "it does not begin again"
            store.add(os.urandom(CHUNK))
            store.flush(timeout=20)
        assert len(list(space.rglob("*.kv"))) <= 10


def test_the_least_capacity_holds_one_chunk(tmp_path: Path) -> None:
    with pytest.raises(kvstore.ConfigError, match="below one chunk, which takes 8KiB there"):
        open_store(tmp_path, "threads", f"capacity={SIZE - 1}B")
    with open_store(tmp_path, "threads", f"capacity={SIZE}B") as store:
        for number in range(2):
            store.put(chunk_key(number), bytes(CHUNK))
            assert store.flush(timeout=20)
        tier = store.stats().tiers[1]
        assert (tier.writes, tier.evictions, tier.dropped, tier.chunks) == (2, 1, 0, 1)


def test_free_space_that_is_not_there_costs_stores_only(tmp_path: Path) -> None:
    with open_store(tmp_path, "threads", "min_free=4PiB&timeout=200ms") as store:
        store.put(chunk_key(0), bytes(CHUNK))
        assert store.flush(timeout=20)
        assert (store.stats().tiers[1].writes, store.stats().tiers[1].dropped) == (0, 1)


def test_what_nobody_uses_expires(tmp_path: Path) -> None:
    with open_store(tmp_path, "threads", "ttl=1s") as store:
        store.put(chunk_key(0), bytes(CHUNK))
        assert store.flush(timeout=20)
        deadline = time.monotonic() + 20
        while list((tmp_path / "kv").rglob("*.kv")):
            assert time.monotonic() < deadline
            store.poll()
            time.sleep(0.05)
        assert store.stats().tiers[1].evictions == 1
