"""What is known of keys in a tier: it ages, and it is bounded."""

from __future__ import annotations

from kvstore.presence import AgingSet, Known, Presence
from support.chunks import chunk_key

A, B = chunk_key(1), chunk_key(2)


def test_a_key_stays_at_least_the_ttl_and_at_most_twice_that() -> None:
    for offset in (0.0, 4.0, 9.0):  # whenever in the life of a generation it comes
        aging = AgingSet(100, 10.0)
        aging.add(B, 0.0)
        aging.add(A, offset)
        aging.age(offset + 9.9)
        assert A in aging
        for now in (offset + 10.0, offset + 20.0):
            aging.age(now)
        assert A not in aging


def test_a_long_silence_forgets_everything() -> None:
    aging = AgingSet(100, 10.0)
    aging.add(A, 0.0)
    aging.age(1000.0)
    assert len(aging) == 0


def test_seeing_a_key_again_renews_it() -> None:
    aging = AgingSet(100, 10.0)
    for now in range(0, 100, 5):
        aging.add(A, float(now))
        assert A in aging
    assert len(aging) == 1


def test_the_number_of_keys_is_bounded() -> None:
    aging = AgingSet(10, 1000.0)
    for number in range(100):
        aging.add(chunk_key(number), 0.0)
        assert len(aging) <= 10
    assert chunk_key(99) in aging


def test_a_limit_of_one_still_remembers() -> None:
    aging = AgingSet(1, 10.0)
    aging.add(A, 0.0)
    assert A in aging


def test_discard_and_clear() -> None:
    aging = AgingSet(10, 10.0)
    aging.add(A, 0.0)
    aging.age(10.0)  # now in the older generation
    aging.add(B, 10.0)
    aging.discard(A)
    aging.discard(A)
    assert A not in aging and B in aging
    aging.clear()
    assert len(aging) == 0


def test_presence_holds_the_latest_word() -> None:
    presence = Presence()
    assert presence.get(A) is Known.UNKNOWN
    presence.found(A, 0.0)
    assert presence.get(A) is Known.PRESENT
    presence.lost(A, 0.0)
    assert presence.get(A) is Known.ABSENT
    presence.found(A, 0.0)
    assert presence.get(A) is Known.PRESENT
    assert len(presence) == 1
    presence.clear()
    assert presence.get(A) is Known.UNKNOWN


def test_absence_is_forgotten_sooner_than_presence() -> None:
    presence = Presence(present_ttl=300.0, absent_ttl=5.0)
    presence.found(A, 0.0)
    presence.lost(B, 0.0)
    presence.age(5.0)
    presence.age(10.0)
    assert (presence.get(A), presence.get(B)) == (Known.PRESENT, Known.UNKNOWN)
