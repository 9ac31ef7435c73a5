"""The total of a root: shares of namespaces, and the collector of several, turn by turn, over directories."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.collect.accounting import Accounts, Share
from kvstore.collect.directory import LEAD
from kvstore.collect.limits import Limits
from kvstore.collect.report import Report
from kvstore.collect.shares import cover, enter_share, follow, lower_share, new_stamp, raise_share
from support.chunks import chunk_key
from support.object_store import Bucket
from support.roots import CHUNK, SIZE, A, B, C, Rig, ask, until_done
from support.world import is_idle, wait_for

ONE, TWO = b"1" * 8, b"2" * 8


# Shares.


class World:
    """Books of a root and of two namespaces; whatever happens, what :meth:`check` says holds."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.limits = Limits(1000, None, None, 1)
        self.root = Accounts(counted=True)
        self.spaces = {A: Accounts(counted=True), B: Accounts(counted=True)}

    def check(self) -> None:
        assert self.root.shared_out <= 1000
        for name, accounts in self.spaces.items():
            assert accounts.taken <= accounts.share.size <= self.root.shares.get(name, Share()).size

    def use(self, name: str) -> None:
        """Write, as far as the share goes, or delete."""
        accounts = self.spaces[name]
        accounts.size = self.rng.randrange(accounts.share.size + 1)

    def raising(self, name: str) -> Iterator[None]:
        accounts = self.spaces[name]
        old, wanted = accounts.share, accounts.taken + self.rng.randrange(400)
        yield
        new = raise_share(name, old, wanted, wanted, new_stamp(), self.limits, self.root)
        yield
        enter_share(old, new, accounts)

    def lowering(self, name: str) -> Iterator[None]:
        accounts = self.spaces[name]
        held = max(accounts.share.size, accounts.taken)
        yield
        seen = cover(name, held, new_stamp(), self.root)
        yield
        size = lower_share(seen, new_stamp(), accounts)
        yield
        follow(name, seen, size, self.root)


@pytest.mark.parametrize("seed", range(50))
def test_shares_hold_whoever_dies_between_the_steps(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    going: list[Iterator[None]] = []
    for _ in range(400):
        name = rng.choice((A, B))
        match rng.randrange(4):
            case 0:
                going.append(rng.choice((world.raising, world.lowering))(name))
            case 1:
                world.use(name)
            case _ if going:
                number = rng.randrange(len(going))
                if next(going[number], going) is going or rng.random() < 0.05:
                    del going[number]  # at its end, or dead
        world.check()
    for name in (A, B):
        for _ in world.lowering(name):
            pass
    assert world.root.shared_out == sum(accounts.taken for accounts in world.spaces.values())


# Collectors.


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_namespaces_divide_what_there_is(rig: Rig) -> None:
    first, second = rig.collector(A, 100 * SIZE), rig.collector(B, 100 * SIZE)
    assert until_done(first, ask(ONE, 30)).granted == 30 * SIZE
    assert until_done(second, ask(TWO, 60)).granted == 60 * SIZE
    assert rig.shares() == {A: 30, B: 60}
    assert until_done(second, ask(TWO, 30, claimed=60)).granted == 10 * SIZE
    assert until_done(second, ask(TWO, 20, claimed=70)).granted == 0


def test_the_least_recently_used_go_whatever_namespace_they_are_in(rig: Rig) -> None:
    rig.write(A, *range(40), age=300)
    rig.write(B, *range(20), age=500)
    rig.write(B, *range(20, 40), age=100)
    rig.write(C, *range(5), age=400)  # nobody uses it, and it has no books
    collector = rig.collector(A, 90 * SIZE)
    answer = until_done(collector, ask(ONE, 30))
    assert answer.granted == 30 * SIZE
    assert rig.left(B) == set(range(20, 40))
    assert rig.left(C) == set()
    assert len(rig.left(A)) == 40
    assert answer.removed == [], "nothing of its own went"
    assert rig.shares() == {A: 70, B: 20, C: 0}


def test_what_nobody_uses_counts_by_its_books(rig: Rig) -> None:
    rig.write(A, *range(40), age=300)
    former = rig.collector(A, 100 * SIZE)
    until_done(former, ask(ONE, 1))
    former.turn(Report(ONE, leaving=True))
    former.close()
    rig.write(B, *range(60), age=100)
    answer = until_done(rig.collector(B, 100 * SIZE), ask(TWO, 20))
    assert answer.granted == 20 * SIZE
    assert len(rig.left(A)) == 20
    assert len(rig.left(B)) == 60
    accounts = rig.books_of(A).read()
    assert accounts is not None
    assert (accounts.size, accounts.chunks) == (20 * SIZE, 20), "its books know"


def test_no_more_than_is_needed(rig: Rig) -> None:
    rig.write(A, *range(48), age=200)
    rig.write(B, *range(46), age=100)
    first, second = rig.collector(A, 100 * SIZE), rig.collector(B, 100 * SIZE)
    assert until_done(first, ask(ONE, 1)).granted == SIZE
    assert until_done(second, ask(TWO, 4)).granted == 4 * SIZE
    assert len(rig.left(A)) + len(rig.left(B)) == 94, "there was room for five, above the high watermark"
    assert until_done(second, ask(TWO, 3, claimed=4)).granted == 3 * SIZE
    assert (len(rig.left(A)), len(rig.left(B))) == (46, 46), "two were too many"


def test_from_the_high_watermark_to_the_low_one(rig: Rig) -> None:
    rig.write(A, *range(50), age=200)
    rig.write(B, *range(45), age=100)
    collector = rig.collector(B, 100 * SIZE)
    assert until_done(collector, ask(ONE, 5)).removed == []
    assert len(rig.left(A)) == 50, "at the high watermark"
    rig.write(B, 45)
    report = ask(ONE, 1, created=1, claimed=4)
    assert until_done(collector, report).granted == SIZE
    assert (len(rig.left(A)), len(rig.left(B))) == (44, 46)


def test_a_share_that_is_not_used_is_there_for_others(rig: Rig) -> None:
    first, second = rig.collector(A, 100 * SIZE), rig.collector(B, 100 * SIZE)
    until_done(first, ask(ONE, 80))
    first.turn(Report(ONE))  # it gives everything back
    assert rig.shares() == {A: 80, B: 0}
    assert until_done(second, ask(TWO, 70)).granted == 70 * SIZE
    assert rig.shares() == {A: 0, B: 70}


def test_one_makes_room_at_a_time(rig: Rig) -> None:
    rig.write(A, *range(90))
    collector = rig.collector(A, 100 * SIZE)
    until_done(collector, Report(ONE))
    before = rig.left(A)
    other = rig.books.lock(LEAD)
    assert other.acquire()
    answer = collector.turn(ask(ONE, 20))
    assert (answer.granted, answer.more, answer.removed) == (10 * SIZE, False, []), "what was left"
    assert rig.left(A) == before
    other.release()
    assert until_done(collector, ask(ONE, 10, claimed=10)).granted == 10 * SIZE


def test_who_waits_no_longer_does_not_keep_others_from_making_room(rig: Rig) -> None:
    rig.write(A, *range(100), age=100)
    hasty = rig.collector(A, 100 * SIZE, seconds=0.0)  # its turns end as soon as they can
    patient = rig.collector(B, 100 * SIZE)
    granted = 0
    while granted < 2 * SIZE:
        wanted = 2 * SIZE - granted
        granted += hasty.turn(Report(ONE, claimed=granted, least=1, needed=wanted, wanted=wanted)).granted
    had = 0
    for _ in range(200):
        hasty.turn(Report(ONE, claimed=granted))
        wanted = 20 * SIZE - had
        had += patient.turn(Report(TWO, claimed=had, least=1, needed=wanted, wanted=wanted)).granted
    assert had == 20 * SIZE


def test_a_namespace_that_is_being_collected_is_passed_by(rig: Rig) -> None:
    rig.write(A, *range(50), age=500)
    rig.write(B, *range(50), age=100)
    first, second = rig.collector(A, 200 * SIZE), rig.collector(B, 100 * SIZE)
    until_done(first, Report(ONE))
    busy = rig.books_of(A).lock(LEAD)
    assert busy.acquire()
    assert until_done(second, ask(TWO, 5)).granted == 5 * SIZE
    assert len(rig.left(A)) == 50
    assert len(rig.left(B)) < 50
    busy.release()


def test_the_limits_of_a_namespace_hold_as_well(rig: Rig) -> None:
    rig.write(A, *range(10), age=100)
    collector = rig.collector(A, 100 * SIZE, capacity=10 * SIZE)
    assert until_done(collector, ask(ONE, 5)).granted == 5 * SIZE
    assert len(rig.left(A)) == 5
    assert rig.shares() == {A: 10}


def test_a_namespace_that_was_removed_gives_its_share_back(rig: Rig) -> None:
    rig.write(A, *range(80))
    until_done(rig.collector(A, 100 * SIZE), ask(ONE, 1))
    shutil.rmtree(rig.path / A)
    assert until_done(rig.collector(B, 100 * SIZE), ask(TWO, 90)).granted == 90 * SIZE
    assert rig.shares() == {B: 90}


def test_lost_books_of_a_root_are_begun_anew(rig: Rig) -> None:
    rig.write(A, *range(60), age=100)
    first, second = rig.collector(A, 100 * SIZE), rig.collector(B, 100 * SIZE)
    assert until_done(first, ask(ONE, 10)).granted == 10 * SIZE
    (rig.path / "accounting" / "state.json").unlink()
    assert until_done(second, ask(TWO, 20)).granted == 20 * SIZE
    assert rig.shares() == {A: 70, B: 20}


def test_what_the_dead_were_granted_comes_back(rig: Rig) -> None:
    rig.write(A, *range(20), age=100)
    dead = rig.collector(A, 100 * SIZE)
    until_done(dead, ask(ONE, 60))
    dead.close()  # its locks are free, and it never reported what it wrote: nothing
    assert until_done(rig.collector(B, 100 * SIZE), ask(TWO, 70)).granted == 70 * SIZE
    accounts = rig.books_of(A).read()
    assert accounts is not None
    assert (accounts.size, len(rig.left(A))) == (20 * SIZE, 20), "counted again, and nothing was deleted"


def test_a_namespace_out_of_reach_costs_its_own_room_only(rig: Rig) -> None:
    rig.write(A, *range(50), age=500)
    rig.write(B, *range(45), age=100)
    former = rig.collector(A, 100 * SIZE)
    until_done(former, ask(ONE, 1))
    former.turn(Report(ONE, leaving=True))
    (rig.path / A / "accounting" / "state.json").unlink()
    (rig.path / A / "accounting" / "state.json").mkdir()  # no user can read that, not even root
    assert until_done(rig.collector(B, 100 * SIZE), ask(TWO, 10)).granted == 10 * SIZE
    assert len(rig.left(A)) == 50
    assert len(rig.left(B)) < 45


# Stores.


@pytest.fixture(params=["threads", "processes"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_store(url: str, model: str, engine: str = "threads", **tier: Any) -> kvstore.Store:
    return kvstore.open(
        "ram://?capacity=1MiB&pin=off",
        {"url": url, "workers": 1, "total": 20 * SIZE, **tier},
        chunk_size=CHUNK,
        namespace={"model": model},
        engine=engine,
    )


def fill(store: kvstore.Store, count: int) -> None:
    """Store chunks until the tier has taken so many; on a slow machine some find no room in time."""
    deadline = time.monotonic() + 120
    number = 0
    while store.stats().tiers[1].writes < count:
        assert time.monotonic() < deadline, "it gets no room"
        store.put(chunk_key(number), bytes([number % 256]) * CHUNK)
        number += 1
        if not number % 5:
            store.flush(timeout=60)


def used(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.kv"))


def test_stores_of_two_models_keep_to_one_total(tmp_path: Path, engine: str) -> None:
    url = f"file://{tmp_path}"
    with open_store(url, "one", engine) as one, open_store(url, "two", engine) as two:
        for store, count in ((one, 15), (two, 15), (one, 30), (two, 30)):
            fill(store, count)
            assert used(tmp_path) <= 20 * SIZE
        assert (one.stats().tiers[1].errors, two.stats().tiers[1].errors) == (0, 0)
    assert used(tmp_path) >= 15 * SIZE


def test_what_goes_in_the_own_namespace_is_an_event(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}", "one") as store:
        fill(store, 30)
        wait_for(lambda: is_idle(store), store)
        tier = store.stats().tiers[1]
        there = {path.stem for path in tmp_path.rglob("*.kv")}
        events = [event for event in store.events() if event.kind == "removed" and event.source == tier.name]
    gone = {key.hex() for event in events for key in event.keys}
    assert len(gone) == tier.evictions >= 10
    assert len(gone) + len(there) == tier.writes
    assert not gone & there


def test_a_total_below_one_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(kvstore.ConfigError, match="total=.* is below one chunk"):
        open_store(f"file://{tmp_path}", "one", total=SIZE - 1)


def test_a_root_in_a_bucket_keeps_to_its_total(bucket: Bucket) -> None:
    pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")
    tier: dict[str, Any] = {"storage_options": bucket.options}
    with open_store(bucket.url, "one", **tier) as one, open_store(bucket.url, "two", **tier) as two:
        for store in (one, two):
            fill(store, 15)
        names = [name for name in bucket.names("kv/") if name.endswith(".kv")]
        assert 10 <= len(names) <= 20
        assert "kv/accounting/state.json" in bucket.names("kv/")
