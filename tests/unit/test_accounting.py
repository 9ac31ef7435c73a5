"""Locks, limits and books of those who share a directory."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from kvstore.collect.accounting import Accounts, Turnover
from kvstore.collect.directory import DirectoryBooks
from kvstore.collect.limits import Free, Limits
from kvstore.collect.lock import FileLock
from kvstore.collect.report import Answer, Report
from kvstore.collect.survey import Oldest

ONE, TWO = b"1" * 8, b"2" * 8
DAY = 24 * 3600.0 + 1
ROOMY = Free(1 << 40, 1 << 41, 1 << 20, 1 << 21)


# Locks.


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    mine, other = (FileLock(str(tmp_path / "lock")) for _ in range(2))
    assert mine.acquire()
    assert mine.acquire(), "it is mine already"
    assert not other.acquire(0.01)
    mine.release()
    assert other.acquire()
    assert (mine.held, other.held) == (False, True)


def test_a_lock_whose_file_is_gone_is_not_held(tmp_path: Path) -> None:
    mine, other = (FileLock(str(tmp_path / "lock")) for _ in range(2))
    assert mine.acquire()
    (tmp_path / "lock").unlink()
    assert not mine.held
    assert other.acquire()
    assert not mine.acquire()


def test_removing_a_lock_lets_go(tmp_path: Path) -> None:
    mine, other = (FileLock(str(tmp_path / "lock")) for _ in range(2))
    assert mine.acquire()
    other.remove()
    assert mine.held, "only the holder removes the file"
    mine.remove()
    assert not (tmp_path / "lock").exists()


# Limits.


def test_watermarks() -> None:
    limits = Limits(1000, None, None, largest=50)
    assert limits.step == 50
    assert limits.excess(950, 0, 0, ROOMY, 50) == 0, "at the high watermark"
    assert limits.excess(951, 0, 0, ROOMY, 50) == 51, "down to the low one"
    assert limits.excess(900, 90, 30, ROOMY, 50) == 20, "no more than is needed"
    assert limits.room(900, 90, ROOMY) == 10
    assert limits.room(990, 90, ROOMY) == 0


def test_a_step_smaller_than_an_object_is_none() -> None:
    limits = Limits(1000, None, None, largest=51)
    assert limits.step == 0
    assert limits.excess(1000, 0, 0, ROOMY, 51) == 0
    assert limits.excess(1000, 0, 30, ROOMY, 51) == 30


def test_free_space_of_the_file_system() -> None:
    limits = Limits(None, 1000, None, largest=10)
    free = Free(1100, 10_000, 500, 1000)
    assert limits.room(5000, 40, free) == 60
    assert limits.excess(5000, 40, 60, free, 10) == 0
    assert limits.excess(5000, 40, 61, free, 10) == 1
    assert limits.excess(5000, 0, 0, Free(900, 10_000, 500, 1000), 10) == 150, "and a step more"
    assert limits.excess(100, 0, 0, Free(0, 10_000, 500, 1000), 10) == 100, "never more than there is"


def test_free_inodes_are_the_same_share() -> None:
    limits = Limits(None, 1000, None, largest=10)
    scarce = Free(9000, 10_000, 93, 1000)  # a tenth of the bytes, so a tenth of the inodes
    assert limits.room(5000, 0, scarce) == 0
    assert limits.excess(5000, 0, 0, scarce, 10) == 70
    uncounted = Free(9000, 10_000, 0, 0)
    assert limits.room(5000, 0, uncounted) == 8000


# Messages.


def test_reports_and_answers_survive_the_way() -> None:
    report = Report(ONE, 1, 2, 3, 4, 5, 6, 7, 8, 9, leaving=True, work=False)
    assert Report.unpack(report.pack()) == report
    removed = [(b"k" * 16, 8192, 1.5)]
    for more in (False, True):
        assert Answer.of(7, Answer(7, 100, 3, more, removed).rows()) == (7, 100, 3, more, removed)


# Books.


def test_reports_are_cumulative() -> None:
    accounts = Accounts()
    accounts.enter(Report(ONE))
    accounts.enter(Report(TWO))
    accounts.enter(Report(ONE, 1, 100, claimed=50))
    accounts.enter(Report(ONE, 1, 100, claimed=50))
    accounts.enter(Report(ONE, 3, 300, 1, 100))
    accounts.enter(Report(TWO, 1, 10, claimed=7))
    assert (accounts.chunks, accounts.size, accounts.claimed) == (3, 210, 7)
    assert accounts.turnover == Turnover(4, 310, 1, 100)


def test_books_are_kept(tmp_path: Path) -> None:
    books = DirectoryBooks(str(tmp_path), mode=0o640)
    assert books.read() is None
    with books.edit() as accounts:
        accounts.enter(Report(ONE))
        accounts.enter(Report(ONE, 2, 20))
    again = DirectoryBooks(str(tmp_path)).read()
    assert again is not None
    assert (again.chunks, again.size, again.counted) == (2, 20, False)
    state = tmp_path / "accounting" / "state.json"
    assert state.stat().st_mode & 0o777 == 0o640
    assert state.parent.stat().st_mode & 0o777 == 0o750
    assert {path.name for path in state.parent.iterdir()} == {"lock", "state.json"}


def test_a_change_that_fails_is_none(tmp_path: Path) -> None:
    books = DirectoryBooks(str(tmp_path))
    with pytest.raises(ZeroDivisionError), books.edit() as accounts:
        accounts.size = 1 // 0
    assert books.read() is None
    with books.edit() as accounts:
        accounts.size = 1


def test_torn_books_are_begun_anew(tmp_path: Path) -> None:
    books = DirectoryBooks(str(tmp_path))
    with books.edit() as accounts:
        accounts.size = 5
    (tmp_path / "accounting" / "state.json").write_bytes(b'{"size": 5')
    with books.edit() as accounts:
        assert (accounts.size, accounts.counted) == (0, False)


def test_books_that_somebody_deletes_come_back(tmp_path: Path) -> None:
    books = DirectoryBooks(str(tmp_path / "space"))
    with books.edit() as accounts:
        accounts.size = 5
    shutil.rmtree(tmp_path / "space")
    with books.edit() as accounts:
        accounts.size += 1
    found = books.read()
    assert found is not None and found.size == 1


def test_a_lock_that_is_not_given_back_is_an_error(tmp_path: Path) -> None:
    books = DirectoryBooks(str(tmp_path), patience=0.01)
    with books.edit():
        pass
    stuck = books.lock("lock")
    assert stuck.acquire()
    with pytest.raises(TimeoutError, match="somebody has held"), books.edit():
        pass


def _die_with_a_grant(path: str) -> None:
    books = DirectoryBooks(path)
    with books.edit() as accounts:
        assert books.member_lock(ONE.hex()).acquire()
        accounts.enter(Report(ONE))
        accounts.enter(Report(ONE, 1, 100, claimed=40))
    os._exit(1)


def test_what_the_dead_were_granted_counts_as_written(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_with_a_grant, args=(str(tmp_path),))
    process.start()
    process.join(30)
    books = DirectoryBooks(str(tmp_path))
    lock = books.member_lock(TWO.hex())
    with books.edit() as accounts:
        assert lock.acquire()
        accounts.enter(Report(TWO))
        accounts.enter(Report(TWO, 1, 100, claimed=30))
        books.bury_the_dead(accounts)
        assert (accounts.size, accounts.claimed, accounts.doubtful) == (240, 30, True)
        accounts.enter(Report(ONE, 2, 140))  # only its worker had died
        assert (accounts.size, accounts.members[ONE.hex()].gone) == (280, 0.0)
        books.bury_the_dead(accounts)
        accounts.bury(ONE.hex(), accounts.members[ONE.hex()].gone + DAY)
        assert accounts.members.keys() == {TWO.hex()}, "after a day nobody remembers it"
    assert books.is_used()
    lock.release()
    assert not books.is_used()


def test_what_the_forgotten_did_is_not_entered_again() -> None:
    accounts = Accounts(size=1000, chunks=100, counted=True)
    accounts.enter(Report(ONE))
    accounts.enter(Report(ONE, 10, 100, 60, 600))
    accounts.bury(ONE.hex(), 1.0)
    accounts.bury(ONE.hex(), 1.0 + DAY)
    accounts.enter(Report(ONE, 10, 100, 60, 600))
    assert (accounts.size, accounts.chunks, accounts.turnover) == (500, 50, Turnover(10, 100, 60, 600))
    assert not accounts.counted, "it may have created more than anybody knows"
    accounts.counted = True
    accounts.enter(Report(ONE, 11, 110, 60, 600))
    assert (accounts.size, accounts.chunks, accounts.counted) == (510, 51, True)


def test_deleting_before_the_first_report_makes_doubtful_only() -> None:
    accounts = Accounts(size=100, chunks=10, counted=True)
    accounts.enter(Report(ONE, deleted=2, deleted_bytes=20))
    assert (accounts.size, accounts.chunks) == (100, 10), "too high at most"
    assert (accounts.counted, accounts.doubtful) == (True, True)


def test_a_survey_leaves_right_books_alone() -> None:
    accounts = Accounts(size=100, chunks=10, counted=True)
    since = Turnover()
    accounts.enter(Report(ONE))
    accounts.enter(Report(ONE, 2, 20, claimed=5))  # during the survey: seen, or not
    for chunks, size in ((10, 100), (11, 110), (12, 120)):
        accounts.reconcile(chunks, size, since, 0)
        assert (accounts.chunks, accounts.size) == (12, 120)


def test_a_survey_puts_wrong_books_right() -> None:
    accounts = Accounts(size=500, chunks=50, doubtful=True)
    accounts.reconcile(10, 100, Turnover(), 0)
    assert (accounts.size, accounts.chunks, accounts.counted, accounts.doubtful) == (100, 10, True, False)
    accounts.size, accounts.chunks = 0, 0
    accounts.reconcile(10, 100, Turnover(), 0)
    assert (accounts.size, accounts.chunks) == (100, 10)


# Surveys.


def test_the_oldest_of_many() -> None:
    oldest = Oldest(most=3)
    for number in (5, 1, 4, 2, 3, 0):
        oldest.add(bytes([number]), number, float(number))
    assert oldest.passed
    assert [key[0] for _, _, key in oldest.take()] == [2, 1, 0]
