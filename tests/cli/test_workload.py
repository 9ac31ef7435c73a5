"""Payloads that check themselves, and the made-up workload."""

from __future__ import annotations

import itertools

import pytest

import kvstore
from kvstore.traces import Request
from kvstore.workload import Payloads, chunk_key, conversations, replay


@pytest.mark.parametrize("size", [1, 7, 4096, 5000, 65536])
def test_payloads_tell_wrong_bytes(size: int) -> None:
    payloads = Payloads(size, rows=2)
    one, other = chunk_key(1), chunk_key(2)
    made = {key: bytearray(view) for key, view in payloads.make([one, other]).items()}
    assert {len(data) for data in made.values()} == {size}
    for key, data in made.items():
        assert payloads.matches(key, memoryview(data))
        assert not payloads.matches(key, memoryview(data[:-1]))
        assert not payloads.matches(key, memoryview(data + b"\0"))
        data[-1] ^= 1
        assert not payloads.matches(key, memoryview(data))
    if size > 8:
        data = bytes(payloads.make([one])[one])
        assert not payloads.matches(other, memoryview(data))


def test_payloads_tell_misplaced_pages() -> None:
    payloads = Payloads(4 * 4096)
    key = chunk_key("a")
    data = bytes(payloads.make([key])[key])
    pages = [data[start : start + 4096] for start in range(0, len(data), 4096)]
    for order in itertools.permutations(range(4)):
        moved = memoryview(b"".join(pages[page] for page in order))
        assert payloads.matches(key, moved) == (order == (0, 1, 2, 3))


def test_payloads_are_the_same_everywhere() -> None:
    """A later run checks what an earlier one has stored."""
    key = chunk_key("a")
    assert kvstore.content_key(Payloads(5000).make([key])[key]).hex() == "9c4fa63ef116a6989f43b0a4813ca01b"


def test_conversations() -> None:
    made = list(conversations(seed=1, users=20, requests=200, prompts=3))
    assert made == list(conversations(seed=1, users=20, requests=200, prompts=3))
    assert made != list(conversations(seed=2, users=20, requests=200, prompts=3))
    by_session: dict[str, list[Request]] = {}
    for request in made:
        by_session.setdefault(request.session, []).append(request)
    assert max(map(len, by_session.values())) > 3
    for turns in by_session.values():
        for before, after in itertools.pairwise(turns):
            assert list(after.keys[: len(before.keys)]) == list(before.keys)
            assert len(after.keys) > len(before.keys)


def test_every_reference_counts() -> None:
    """Repeated keys in one request, and hits behind a miss."""
    requests = [Request(0.0, ["a", "b", "a"]), Request(0.0, ["c", "b", "a", "a"])]
    seen = []
    with kvstore.open("ram://?capacity=1MiB", chunk_size=4096) as store:
        outcome = replay(store, requests, on_request=lambda so_far: seen.append(so_far.requests))
    assert (outcome.requests, outcome.chunks, outcome.unique_chunks) == (2, 7, 3)
    assert (outcome.verified_chunks, outcome.mismatches) == (4, 0)
    assert outcome.hit_ratio == 4 / 7
    assert seen == [1, 2]


def test_requests_larger_than_the_host(tmp_path: object) -> None:
    requests = [Request(0.0, range(100))] * 2
    with kvstore.open("ram://?capacity=64KiB", str(tmp_path), chunk_size=4096) as store:
        outcome = replay(store, requests)
    assert (outcome.verified_chunks, outcome.mismatches) == (100, 0)


def test_real_time() -> None:
    """Late requests, and those of before, are served at once."""
    requests = [Request(at, ["a"]) for at in (1000.0, 1150.0, 0.0)]
    with kvstore.open("ram://?capacity=1MiB", chunk_size=4096) as store:
        slow, fast = replay(store, requests, real_time=True), replay(store, requests)
    assert 0.15 <= slow.seconds < 1.0
    assert fast.seconds < 0.15
