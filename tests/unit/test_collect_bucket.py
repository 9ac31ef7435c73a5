"""Books and collectors over a real bucket, turn by turn; and a store that shares one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

import kvstore
from kvstore.backends import BackendContext
from kvstore.backends._s3_client import Client
from kvstore.backends._s3_versions import VersionedObjects
from kvstore.collect import bucket as bucket_module
from kvstore.collect.accounting import Accounts
from kvstore.collect.bucket import BucketBooks
from kvstore.collect.collector import Collector
from kvstore.collect.limits import Limits
from kvstore.collect.report import Answer, Report, Row
from kvstore.errors import ConfigError
from support.chunks import chunk_key
from support.object_store import Bucket
from support.tcp_proxy import Proxy
from support.world import is_idle, wait_for

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

from kvstore.backends.s3 import S3Backend

CHUNK = 4096
SIZE = 2 * CHUNK  # on storage
ONE, TWO = b"1" * 8, b"2" * 8
SPACE = "0f" * 16
#: The lease lasts for four times as long.
TIMEOUT = 10.0


class Rig:
    """A namespace in a bucket, and collectors over it."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        context = BackendContext(bytes(16), b"manifest", CHUNK)
        self.backend = S3Backend(context, bucket.url, SPACE, bucket.options)
        self.backend.open()
        self._open: list[Any] = [self.backend]

    def books(self, bucket: Bucket | None = None) -> BucketBooks:
        books = books_in(bucket or self.bucket, SPACE, TIMEOUT)
        books.seconds = 60.0  # a turn ends when there is nothing left to do, however busy the machine is
        self._open.append(books)
        return books

    def collector(self, capacity: int | None, ttl: float | None = None, **options: Any) -> Collector:
        return Collector(self.backend, self.books(), Limits(capacity, None, ttl, SIZE), **options)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.backend.write(chunk_key(number), memoryview(bytes(CHUNK)))

    def left(self) -> set[int]:
        there = {found.key for found in self.backend.scan()}
        return {number for number in range(256) if chunk_key(number) in there}

    def close(self) -> None:
        for opened in self._open:
            opened.close()


def books_in(bucket: Bucket, space: str, timeout: float = 10.0) -> BucketBooks:
    """Books with a client of their own."""
    client = Client(bucket.url, bucket.options, timeout=60.0, retries=2, concurrency=4)
    return BucketBooks(VersionedObjects(client, space), timeout=timeout, patience=60.0)


@pytest.fixture
def rig(moto_bucket: Bucket) -> Iterator[Rig]:
    with closing(Rig(moto_bucket)) as rig:
        yield rig


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass on the watches by which leases run out; otherwise it stands still."""
    passed = [bucket_module._watch()]
    monkeypatch.setattr(bucket_module, "_watch", lambda: passed[0])

    def let_pass(seconds: float) -> None:
        passed[0] += seconds

    return let_pass


def until_done(collector: Collector, report: Report) -> Answer:
    removed: list[Row] = []
    for _ in range(100):
        answer = collector.turn(report)
        removed += answer.removed
        if not answer.more:
            return answer._replace(removed=removed)
    raise AssertionError("it does not come to an end")


# Accounts.


def test_changes_of_many_are_all_kept(rig: Rig) -> None:
    def add(accounts: Accounts) -> None:
        accounts.size += 1

    def add_some(books: BucketBooks) -> None:
        for _ in range(5):
            books.change(add)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_some, [rig.books() for _ in range(4)]))
    found = rig.books().read()
    assert found is not None and found.size == 20


def test_a_change_that_changes_nothing_writes_nothing(rig: Rig) -> None:
    with Proxy(rig.bucket.address) as proxy:
        books = rig.books(rig.bucket.at(proxy.endpoint))
        books.change(lambda accounts: None)
        proxy.forget()
        books.change(lambda accounts: None)
        assert (proxy.count("GET"), proxy.count("PUT")) == (1, 0)
        books.close()


def test_a_change_whose_answer_is_lost_is_not_made_twice(bucket: Bucket) -> None:
    with Proxy(bucket.address) as proxy:
        books = books_in(bucket.at(proxy.endpoint), SPACE)
        books.change(lambda accounts: accounts.reconcile(10, 100, accounts.turnover, 0))
        assert books.take_lead()

        def remove(accounts: Accounts) -> int:
            accounts.removed(1, 10)
            proxy.answer_limit, proxy.most_cuts = len(b"HTTP/1.1 100 Continue\r\n\r\n"), 1
            return accounts.size

        assert books.change(remove) == 90
        assert proxy.cuts == 1
        found = books.read()
        assert found is not None
        assert (found.chunks, found.size) == (9, 90)
        books.close()


def test_torn_books_are_begun_anew(rig: Rig) -> None:
    rig.write(1)
    rig.collector(100 * SIZE).turn(Report(ONE))
    rig.bucket.client().put_object(
        Bucket=rig.bucket.name, Key=f"kv/{SPACE}/accounting/state.json", Body=b'{"size": 5'
    )
    assert rig.collector(100 * SIZE).turn(Report(TWO)).size == SIZE


def test_a_server_that_ignores_conditions_is_refused_by_name(moto_bucket: Bucket) -> None:
    with Proxy(moto_bucket.address) as proxy:
        proxy.rewrite = lambda data: data.replace(b"If-Match", b"X-Ignore").replace(b"if-match", b"x-ignore")
        books_there = books_in(moto_bucket.at(proxy.endpoint), SPACE)
        with closing(books_there) as books, pytest.raises(ConfigError, match="kvstore prune"):
            books.change(lambda accounts: setattr(accounts, "size", 7))


def test_what_the_silent_were_granted_counts_as_written(rig: Rig) -> None:
    books = rig.books()

    def enter(accounts: Accounts) -> None:
        for name in (ONE, TWO):
            accounts.enter(Report(name))
        accounts.enter(Report(ONE, 1, 100, claimed=40))
        accounts.enter(Report(TWO, 1, 100, claimed=30))
        books.join(accounts, ONE.hex())
        books.join(accounts, TWO.hex())
        accounts.members[ONE.hex()].seen -= 3600
        books.bury_the_dead(accounts)

    books.change(enter)
    found = books.read()
    assert found is not None
    assert (found.size, found.claimed, found.doubtful) == (240, 30, True)
    assert books.is_used()


# The lease.


def test_the_lead_has_one_holder(rig: Rig) -> None:
    one, other = rig.books(), rig.books()
    assert one.take_lead()
    assert not other.take_lead()
    assert one.take_lead(), "it is mine already"
    one.change(one.lay_down)
    assert other.take_lead()
    assert not one.keep_lead()


def test_a_lease_that_stands_still_runs_out(rig: Rig, watch: Callable[[float], None]) -> None:
    dead, other = rig.books(), rig.books()
    assert dead.take_lead()
    watch(1000.0)
    assert not other.take_lead(), "it has not watched yet"
    watch(0.9 * 4 * TIMEOUT)
    assert not other.take_lead()
    watch(0.2 * 4 * TIMEOUT)
    assert other.take_lead()


def test_a_lease_that_moves_does_not_run_out(rig: Rig, watch: Callable[[float], None]) -> None:
    holder, other = rig.books(), rig.books()
    assert holder.take_lead()
    for _ in range(5):
        assert not other.take_lead()
        watch(0.8 * 4 * TIMEOUT)
        assert holder.keep_lead()
    assert not other.take_lead()


def test_a_holder_that_wakes_up_notices(rig: Rig, watch: Callable[[float], None]) -> None:
    """It deletes nothing more, and what it has deleted is not subtracted a second time."""
    rig.write(*range(10))
    hung, other = rig.collector(4 * SIZE), rig.collector(4 * SIZE)
    hung._books.batch = 2
    delete = rig.backend.delete
    deleted: list[bytes] = []

    def hang(keys: list[bytes]) -> None:
        delete(keys)
        deleted.extend(keys)
        rig.backend.delete = delete  # type: ignore[method-assign]
        other.turn(Report(TWO))
        watch(4.1 * TIMEOUT)
        until_done(other, Report(TWO))

    rig.backend.delete = hang  # type: ignore[assignment, method-assign]
    answer = hung.turn(Report(ONE))
    assert len(deleted) == 2
    assert len(answer.removed) == 2
    accounts = hung._books.read()
    assert accounts is not None
    assert (accounts.chunks, accounts.size) == (4, 4 * SIZE) == (len(rig.left()), len(rig.left()) * SIZE)


def test_who_loses_the_lead_does_not_go_on_one_by_one(rig: Rig, watch: Callable[[float], None]) -> None:
    rig.write(*range(10))
    slow, other = rig.collector(4 * SIZE), rig.books()
    asked: list[int] = []

    def fail(keys: list[bytes]) -> None:
        asked.append(len(keys))
        other.take_lead()
        watch(4.1 * TIMEOUT)
        assert other.take_lead()
        raise OSError("a batch that has failed")

    rig.backend.delete = fail  # type: ignore[assignment, method-assign]
    assert slow.turn(Report(ONE)).removed == []
    assert asked == [6]


def test_a_batch_that_takes_its_time_is_over_before_the_lease(
    rig: Rig, watch: Callable[[float], None]
) -> None:
    holder, other = rig.books(), rig.books()
    assert holder.take_lead()
    assert not other.take_lead()
    watch(1.9 * TIMEOUT)
    asked = holder._good_until
    assert holder.keep_lead() and holder._good_until == asked, "it is not raised yet"
    watch(2 * 0.8 * TIMEOUT)  # a look at each object, and a request to delete them
    assert not other.take_lead()


def test_a_closed_holder_gives_the_lead_back(rig: Rig) -> None:
    one, other = rig.books(), rig.books()
    assert one.take_lead()
    one.close()
    assert other.take_lead()


# Turns.


def test_the_first_turn_counts_what_is_there(rig: Rig) -> None:
    rig.write(*range(5))
    answer = rig.collector(100 * SIZE).turn(Report(ONE, least=SIZE, needed=SIZE, wanted=3 * SIZE))
    assert answer == (3 * SIZE, 5 * SIZE, 5, False, [])


def test_the_next_instance_need_not_count(rig: Rig) -> None:
    rig.write(*range(5))
    first = rig.collector(100 * SIZE)
    first.turn(Report(ONE))
    first.turn(Report(ONE, leaving=True))
    rig.backend.delete([chunk_key(0)])  # a listing would see it
    assert rig.collector(100 * SIZE).turn(Report(TWO)).chunks == 5


def test_from_the_high_watermark_to_the_low_one(rig: Rig) -> None:
    rig.write(*range(97))
    answer = until_done(rig.collector(100 * SIZE), Report(ONE))
    assert len(answer.removed) == 7
    assert (answer.size, answer.chunks) == (90 * SIZE, 90)
    assert len(rig.left()) == 90


def test_one_collects_at_a_time(rig: Rig) -> None:
    rig.write(*range(100))
    other = rig.books()
    assert other.take_lead()
    other.change(lambda accounts: accounts.reconcile(100, 100 * SIZE, accounts.turnover, 0))
    collector = rig.collector(100 * SIZE)
    answer = collector.turn(Report(ONE, least=SIZE, needed=SIZE, wanted=SIZE))
    assert (answer.granted, answer.removed, len(rig.left())) == (0, [], 100), "stores, never space"
    other.change(other.lay_down)
    assert until_done(collector, Report(ONE, least=SIZE, needed=SIZE, wanted=SIZE)).granted == SIZE
    assert other.take_lead(), "nothing to do: the lead is free"


def test_what_was_used_since_the_survey_stays(rig: Rig) -> None:
    rig.write(*range(4))
    collector = rig.collector(6 * SIZE)
    collector.turn(Report(ONE))
    rig.write(4, 5)
    collector = rig.collector(5 * SIZE)
    books = collector._books
    still_unused = books.still_unused

    def use_then_look(rows: list[Row]) -> list[Row]:
        time.sleep(1.1)  # the server tells times of objects in seconds
        for key, _, _ in rows:
            rig.backend._client.run(rig.backend._touch, f"{key.hex()[:2]}/{key.hex()}.kv", {})
        return still_unused(rows)

    books.still_unused = use_then_look  # type: ignore[assignment, method-assign]
    assert collector.turn(Report(TWO, 2, 2 * SIZE)).removed == []
    assert rig.left() == set(range(6))


# With a store on top.


def open_store(bucket: Bucket, options: str, engine: str = "threads") -> kvstore.Store:
    return kvstore.open(
        f"ram://?capacity={64 * CHUNK}&pin=off",
        {"url": f"{bucket.url}?{options}", "storage_options": bucket.options},
        chunk_size=CHUNK,
        engine=engine,
    )


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_store_keeps_to_its_capacity_and_says_what_went(bucket: Bucket, engine: str) -> None:
    with open_store(bucket, f"capacity={40 * SIZE}B&workers=1", engine) as store:
        for number in range(100):
            store.put(chunk_key(number), bytes(CHUNK))
        assert store.flush(timeout=60)
        wait_for(lambda: is_idle(store), store)
        tier = store.stats().tiers[1]
        assert (tier.writes, tier.dropped, tier.errors) == (100, 0, 0), tier.last_error
        assert tier.evictions >= 60
        there = {name.rpartition("/")[2][:-3] for name in bucket.names() if name.endswith(".kv")}
        assert 30 <= len(there) <= 40
        gone = {key.hex() for event in store.events() if event.kind == "removed" and event.source == tier.name
                for key in event.keys}  # fmt: skip
        assert gone == {chunk_key(number).hex() for number in range(100)} - there
    (space,) = {name.split("/")[1] for name in bucket.names()}
    with closing(books_in(bucket, space)) as books:
        accounts = books.read()
    assert accounts is not None
    assert (accounts.chunks, accounts.size) == (len(there), len(there) * SIZE)
    assert (accounts.members, accounts.doubtful, accounts.lease.holder) == ({}, False, "")


def test_what_nobody_uses_expires(moto_bucket: Bucket) -> None:
    with open_store(moto_bucket, "ttl=1s&timeout=2s") as store:
        store.put(chunk_key(0), bytes(CHUNK))
        assert store.flush(timeout=20)
        deadline = time.monotonic() + 40
        while store.stats().tiers[1].evictions == 0:
            assert time.monotonic() < deadline
            store.poll()
            time.sleep(0.05)
    assert not [name for name in moto_bucket.names() if name.endswith(".kv")]
