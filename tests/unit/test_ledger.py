"""The ledger of a tier with a capacity."""

from __future__ import annotations

from kvstore.ledger import Ledger
from support.chunks import chunk_key

A, B, C = map(chunk_key, range(3))


def test_what_is_being_written_counts() -> None:
    ledger = Ledger(100)
    ledger.add(A, 40)
    ledger.expected = 40
    assert ledger.fits(20) and not ledger.fits(21)


def test_adding_a_key_again_replaces_its_size() -> None:
    ledger = Ledger(100)
    ledger.add(A, 40)
    ledger.add(A, 10)
    assert (ledger.used, len(ledger), ledger.size(A)) == (10, 1, 10)
    assert ledger.remove(A) == 10
    assert (ledger.used, A in ledger, ledger.remove(A), ledger.size(A)) == (0, False, 0, 0)


def test_victims_are_the_least_recently_used() -> None:
    ledger = Ledger(100)
    for key in (A, B, C):
        ledger.add(key, 30)
    ledger.touch(A)
    ledger.touch(chunk_key(9))  # unknown: no effect
    assert ledger.victims(40, set()) == [B]
    assert ledger.victims(41, set()) == [B, C]
    assert ledger.victims(40, {B}) == [C]
    assert ledger.victims(10, set()) == []
    assert ledger.victims(1000, set()) == [B, C, A], "as many as there are"
    assert len(ledger) == 3, "asking for victims removes none"


def test_a_scan_sets_the_order_by_age() -> None:
    ledger = Ledger(100)
    ledger.load([(A, 30, 3.0), (B, 30, 1.0), (C, 30, 2.0)])
    assert ledger.used == 90
    assert ledger.victims(70, set()) == [B, C]
