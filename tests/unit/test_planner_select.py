"""Which tiers a request is about, and which peers: walks within them, places for peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from planning import OK, Desk, failed

from kvstore.config import TierConfig, parse
from kvstore.engine.base import Status, Verb
from kvstore.errors import ConfigError
from kvstore.opening import settled
from kvstore.planner import Fetch, Lookup
from support.chunks import CHUNK, chunk_key

KEYS = [chunk_key(number) for number in range(6)]
A, B = KEYS[:2]
MISSING = failed(Status.MISSING)


def tier(name: str, **options: Any) -> TierConfig:
    return TierConfig(url="memory://x", name=name, **{"workers": 1, "timeout": 1.0, **options})


def places(count: int, **options: Any) -> list[TierConfig]:
    return [
        TierConfig(url="peer://", name=f"peer-{number}", workers=1, timeout=1.0, **options)
        for number in range(count)
    ]


def ask_for(desk: Desk, *names: str, keys: Sequence[bytes] = (A,)) -> Fetch:
    """A promotion from these tiers, under way."""
    fetch = Fetch(keys)
    fetch.tiers = desk.planner.select(names, desk.now)
    desk.planner.fetch(fetch, desk.now)
    desk.advance()
    return fetch


def look(desk: Desk, *names: str, key: bytes = A) -> Lookup:
    """What a request for these tiers, or the usual ones, hears of `key`; its probes are sent."""
    planner = desk.planner
    [answer] = planner.lookup([key], desk.now, planner.select(names or None, desk.now))
    desk.advance()
    return answer


def test_a_walk_stays_within_the_tiers_of_its_request() -> None:
    desk = Desk(tier("a"), tier("b"), tier("c"))
    assert look(desk, "c", "a") is Lookup.RETRY
    desk.answer(desk.batch(Verb.PROBE, tier=0), MISSING)
    desk.answer(desk.batch(Verb.PROBE, tier=2), MISSING)
    assert look(desk, "a", "c") is Lookup.MISS
    assert desk.batches == []
    assert look(desk) is Lookup.RETRY
    assert desk.batch(Verb.PROBE, tier=1).keys == [A]


def test_one_name_is_no_list_of_names() -> None:
    desk = Desk(tier("a"))
    with pytest.raises(ConfigError, match=r"\['a'\]"):
        desk.planner.select("a", desk.now)


def test_no_tiers_are_none() -> None:
    desk = Desk(tier("a"))
    desk.found(A)
    assert desk.planner.lookup([A], desk.now, desk.planner.select((), desk.now)) == [Lookup.MISS]
    assert look(desk) is Lookup.PENDING


def test_what_one_request_asks_of_its_tiers_holds_up_no_other() -> None:
    desk = Desk(tier("slow"), tier("fast"))
    assert look(desk) is Lookup.RETRY
    assert look(desk, "fast") is Lookup.RETRY
    desk.answer(desk.batch(Verb.PROBE, tier=1), OK)
    assert look(desk, "fast") is Lookup.PENDING
    assert desk.asked(Verb.PROBE) == [[A]]


def test_walks_that_meet_at_a_tier_ask_it_once() -> None:
    desk = Desk(tier("a"), tier("b"))
    fetch = Fetch([A])
    desk.planner.fetch(fetch, desk.now)
    desk.advance()
    look(desk, "b")
    desk.answer(desk.batch(Verb.PROBE, tier=0), MISSING)
    assert desk.asked(Verb.PROBE) == [[A]]
    desk.answer(desk.batch(Verb.PROBE, tier=1), OK)
    desk.answer(desk.batch(Verb.READ, tier=1), OK)
    assert fetch.promoted == [A]


def test_a_promotion_waits_for_no_tier_that_only_others_name() -> None:
    desk = Desk(tier("a"), tier("b"), tier("c"))
    first, second = ask_for(desk, "a", "b", keys=KEYS[:2]), ask_for(desk, "a", "c", keys=KEYS[:2])
    desk.answer(desk.batch(Verb.PROBE, tier=0), MISSING)
    assert [batch.tier for batch in desk.batches] == [1, 2]
    desk.answer(desk.batch(Verb.PROBE, tier=2), OK)
    desk.answer(desk.batch(Verb.READ, tier=2), OK)
    assert second.promoted == KEYS[:2]
    assert not first.done  # for order's sake it waits for the answer of b
    desk.answer(desk.batch(Verb.PROBE, tier=1), MISSING)
    assert first.skipped == KEYS[:2]


def test_answers_from_before_a_deletion_say_nothing_whichever_walk_they_are_of() -> None:
    desk = Desk(tier("a", write="off"), tier("b", write="off"))
    look(desk)
    look(desk, "b")
    desk.planner.delete([A], desk.now)
    desk.store(A)  # shows it again where it could only be hidden
    desk.planner.delete([A], desk.now)
    for index in (0, 1):
        desk.answer(desk.batch(Verb.PROBE, tier=index), OK)
    assert all(len(state.presence.present) == 0 for state in desk.tiers)


def test_a_promotion_stays_within_its_tiers() -> None:
    desk = Desk(tier("a"), tier("b"))
    desk.found(A, tier=0)
    desk.found(B, tier=1)
    fetch = ask_for(desk, "b", keys=[A, B])
    desk.answer(desk.batch(Verb.PROBE, tier=1), MISSING)
    desk.answer(desk.batch(Verb.READ, tier=1), OK)
    assert (fetch.promoted, fetch.missing) == ([B], [A])
    assert desk.tiers[0].counters.misses == 0


def test_chunks_are_written_to_the_tiers_that_are_named() -> None:
    desk = Desk(tier("a"), tier("b"), tier("late", write="on-evict"))
    for key, names in ((A, ["b"]), (B, ["late"])):
        slots = desk.planner.reserve([key], desk.now, lossless=False)
        desk.planner.commit([(key, slots[key], CHUNK)], desk.now, tiers=names)
    desk.advance()
    assert [(batch.tier, batch.keys) for batch in desk.batches] == [(1, [A])]
    assert list(desk.tiers[2].owed) == [B]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["hots"], "no tier 'hots'; did you mean 'hot'"),
        (["peer-0"], "no tier 'peer-0'"),
        (
            ["peer://10.0.0.1:1"],
            "no tier lets requests name this host; add a tier such as peer://?allow=10.0.0.1",
        ),
        (["peer://nowhere"], "peer 'peer://nowhere': not an address"),
    ],
)
def test_names_that_are_none(names: list[str], words: str) -> None:
    desk = Desk(tier("hot"), *places(1))
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        desk.planner.select(names, desk.now)
    with pytest.raises(ConfigError, match="no tier"):
        desk.planner.commit([], desk.now, tiers=names)


# Peers


def peer(number: int) -> str:
    return f"peer://127.0.0.1:{number}"


def test_a_peer_is_asked_by_those_alone_who_name_it() -> None:
    desk = Desk(*places(2))
    assert look(desk) is Lookup.MISS
    assert look(desk, peer(1)) is Lookup.RETRY
    batch = desk.batch(Verb.PROBE)
    assert (batch.tier, batch.address) == (0, "127.0.0.1:1")
    assert look(desk, peer(2)) is Lookup.RETRY
    assert desk.batch(Verb.PROBE, tier=1).address == "127.0.0.1:2"
    desk.answer(batch, OK)
    assert look(desk, peer(1)) is Lookup.PENDING
    assert look(desk) is Lookup.MISS


def test_a_place_goes_to_another_peer_once_it_is_idle() -> None:
    desk = Desk(*places(1))
    look(desk, peer(1))
    assert look(desk, peer(2)) is Lookup.MISS  # crowded: the first is being asked
    assert desk.tiers[0].counters.custom == {"peer_crowded": 1}
    desk.answer(desk.batch(Verb.PROBE), OK)
    assert not desk.planner.is_up(peer(2), desk.now)  # it was named just now
    desk.now += 2
    assert look(desk, peer(2)) is Lookup.RETRY  # nothing is known of the new one
    assert desk.batch(Verb.PROBE).address == "127.0.0.1:2"


def test_a_place_is_kept_while_a_promotion_may_come_to_it() -> None:
    desk = Desk(tier("slow", timeout=9.0), *places(1))
    fetch = ask_for(desk, "slow", peer(1))
    desk.now += 2
    assert look(desk, peer(2)) is Lookup.MISS
    desk.answer(desk.batch(Verb.PROBE), MISSING)
    assert desk.batch(Verb.PROBE, tier=1).address == "127.0.0.1:1"
    desk.answer(desk.batch(Verb.PROBE, tier=1), OK)
    desk.answer(desk.batch(Verb.READ, tier=1), OK)
    assert fetch.promoted == [A]
    desk.now += 2
    assert look(desk, peer(2), key=B) is Lookup.RETRY


def test_a_place_is_kept_while_a_walk_may_come_to_it() -> None:
    desk = Desk(tier("slow", timeout=9.0), *places(1))
    assert look(desk, "slow", peer(1)) is Lookup.RETRY
    desk.now += 2
    assert look(desk, peer(2)) is Lookup.MISS
    desk.answer(desk.batch(Verb.PROBE), MISSING)
    desk.now += 0.5
    assert desk.batch(Verb.PROBE, tier=1).address == "127.0.0.1:1"
    desk.answer(desk.batch(Verb.PROBE, tier=1), MISSING)
    desk.now += 2
    assert look(desk, peer(2)) is Lookup.RETRY


def test_a_promotion_that_is_cancelled_keeps_no_place() -> None:
    desk = Desk(tier("slow", timeout=9.0), *places(1))
    desk.found(A, *KEYS[2:])
    desk.fetch(*KEYS[2:])  # takes all that promotions may have
    fetch = ask_for(desk, "slow", peer(1))
    desk.now += 2
    assert look(desk, peer(2), key=B) is Lookup.MISS
    desk.planner.cancel(fetch)
    assert look(desk, peer(2), key=B) is Lookup.RETRY


def test_to_ask_whether_a_peer_is_up_takes_no_place() -> None:
    desk = Desk(tier("a"), *places(1))
    assert desk.planner.is_up("a", desk.now)
    assert desk.planner.is_up(peer(1), desk.now)
    assert desk.tiers[1].address == ""
    look(desk, peer(1))
    assert not desk.planner.is_up(peer(2), desk.now)
    assert desk.tiers[1].counters.custom == {}
    with pytest.raises(ConfigError, match="no tier 'b'"):
        desk.planner.is_up("b", desk.now)


def test_a_new_peer_does_not_pay_for_the_last_one() -> None:
    desk = Desk(*places(1))
    planner = desk.planner
    keys = iter(map(chunk_key, range(100, 200)))
    while planner.is_up(peer(1), desk.now):
        look(desk, peer(1), key=next(keys))
        desk.answer(desk.batch(Verb.PROBE), failed())
        desk.now += 0.1
    assert look(desk, peer(1)) is Lookup.MISS
    desk.now += 2
    assert planner.is_up(peer(2), desk.now)
    assert look(desk, peer(2)) is Lookup.RETRY


def test_what_was_deleted_is_hidden_whichever_peer_has_the_place() -> None:
    desk = Desk(*places(1))
    desk.planner.delete([A], desk.now)
    assert look(desk, peer(1)) is Lookup.MISS
    assert look(desk, peer(1), key=B) is Lookup.RETRY


def test_the_place_named_longest_ago_goes_first() -> None:
    desk = Desk(*places(2))
    planner = desk.planner
    for number in (1, 2, 1):
        planner.select([peer(number)], desk.now)
        desk.now += 2
    planner.select([peer(3)], desk.now)
    assert [state.address for state in desk.tiers] == ["127.0.0.1:1", "127.0.0.1:3"]


def test_places_have_names_of_their_own() -> None:
    tiers = ["peer://?peers=2", "peer://?peers=1", "memory://?name=peer-3"]
    config = settled(parse("ram://?capacity=4MiB", *tiers))
    assert [tier.name for tier in config.tiers] == ["peer-1", "peer-4", "peer-2", "peer-3"]


def test_hosts_are_those_of_the_tier_that_allows_them() -> None:
    desk = Desk(*places(1), TierConfig(url="peer://", name="far", allow=("10.0.0.0/8",)))
    found = desk.planner.select(["peer://10.1.1.1:5", peer(1)], desk.now)
    assert [(state.name, state.address) for state in found] == [
        ("peer-0", "127.0.0.1:1"),
        ("far", "10.1.1.1:5"),
    ]


def test_what_was_absent_can_be_asked_anew() -> None:
    desk = Desk(tier("a"), tier("b"))
    planner = desk.planner
    look(desk, "a")
    desk.answer(desk.batch(Verb.PROBE), MISSING)
    assert look(desk, "a") is Lookup.MISS
    tiers = planner.select(["a"], desk.now)
    assert planner.lookup([A], desk.now, tiers, anew=["a"]) == [Lookup.RETRY]
    desk.advance()
    assert planner.lookup([A], desk.now, tiers, anew=["a"]) == [Lookup.RETRY]
    assert desk.advance() == []  # it is being asked
    desk.answer(desk.batch(Verb.PROBE), OK)
    assert planner.lookup([A], desk.now, tiers, anew=["a"]) == [Lookup.PENDING]


def test_only_those_are_asked_anew_who_are_named_for_it() -> None:
    desk = Desk(tier("a"), *places(1))
    look(desk, "a", peer(1))
    desk.answer(desk.batch(Verb.PROBE), MISSING)
    desk.answer(desk.batch(Verb.PROBE, tier=1), MISSING)
    tiers = desk.planner.select(["a", peer(1)], desk.now)
    assert desk.planner.lookup([A], desk.now, tiers, anew=[peer(1)]) == [Lookup.RETRY]
    assert [batch.tier for batch in desk.advance()] == [1]


def test_a_busy_place_is_passed_over_for_an_idle_one() -> None:
    desk = Desk(*places(2))
    look(desk, peer(1))
    desk.planner.select([peer(2)], desk.now + 0.5)
    desk.now += 2
    look(desk, peer(3))
    assert [state.address for state in desk.tiers] == ["127.0.0.1:1", "127.0.0.1:3"]
