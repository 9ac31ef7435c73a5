"""Peers that requests name, on the loopback interface, with what can become of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

import kvstore
from kvstore import Lookup
from kvstore.address import Address
from support.object_store import free_ports
from support.peers import CHUNK, evict, peer_of, reader, server
from support.processes import wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

KEYS = [bytes([number]) * 16 for number in range(1, 9)]
ENGINES = ["threads", "processes"]


@pytest.fixture
def owners() -> Iterator[list[kvstore.Store]]:
    """Three stores that serve; each holds the same keys under contents of its own."""
    stores = [server() for _ in range(3)]
    for number, store in enumerate(stores):
        store.put_many({key: said_by(number) for key in KEYS})
    yield stores
    for store in stores:
        store.close()


def said_by(number: int) -> bytes:
    """What the store of this number holds: a test can tell who was asked."""
    return bytes([number]) * 100


def comes(store: kvstore.Store, key: bytes, peer: str, number: int) -> bool:
    """Whether a chunk has come; it may take a busy machine longer than a peer is waited for."""
    found = store.get(key, tiers=[peer])
    assert found in (None, said_by(number))
    return found is not None


def nobody() -> str:
    [port] = free_ports(1)
    return f"peer://127.0.0.1:{port}"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_peer_that_is_named_answers(owners: list[kvstore.Store], engine: str) -> None:
    with reader("peer://", "&peers=3", engine=engine) as store:
        for number, owner in enumerate(owners):
            wait_for(partial(comes, store, KEYS[number], peer_of(owner), number), 30)
        job = store.prefetch(KEYS[3:5], tiers=[peer_of(owners[1])])
        assert job.result(timeout=10).promoted == tuple(KEYS[3:5])
        assert store.get(KEYS[5]) is None
        assert store.get_many(KEYS[:2], tiers=()) == {KEYS[0]: said_by(0), KEYS[1]: said_by(1)}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_place_serves_one_peer_after_the_other(owners: list[kvstore.Store], engine: str) -> None:
    with reader("peer://", "&peers=1", engine=engine) as store:
        for number in (0, 1, 2, 0):
            peer = peer_of(owners[number])
            wait_for(partial(comes, store, KEYS[number], peer, number), 30)
            evict(store)


def test_more_peers_than_places_are_misses_not_mixtures(owners: list[kvstore.Store]) -> None:
    with reader("peer://", "&peers=2", engine="processes") as store:

        def crowded() -> bool:
            for number, owner in enumerate(owners):
                comes(store, KEYS[number], peer_of(owner), number)
            evict(store)
            return any("peer_crowded" in tier.custom for tier in store.stats())

        wait_for(crowded, 30)
        for number, owner in enumerate(owners):  # one by one there is room for each
            wait_for(partial(comes, store, KEYS[number + 3], peer_of(owner), number), 30)


def test_a_peer_that_is_not_there_costs_its_request_little_and_others_nothing(
    owners: list[kvstore.Store],
) -> None:
    gone = nobody()
    with reader("peer://", "&peers=2") as store:
        began = time.monotonic()
        job = store.prefetch(KEYS[:1], tiers=[gone])
        assert store.get(KEYS[0], tiers=[peer_of(owners[0])]) == said_by(0)
        assert time.monotonic() - began < 2
        job.result(timeout=10)
        while store.is_up(gone):
            assert store.get(os.urandom(16), tiers=[gone]) is None
        began = time.monotonic()
        assert store.get(KEYS[2], tiers=[gone]) is None
        assert time.monotonic() - began < 0.5


def test_a_peer_that_comes_back_is_found() -> None:
    peer = nobody()
    address = str(Address.parse(peer.removeprefix("peer://")))
    with reader("peer://") as store:
        with server(serve=address) as once:
            once.put(KEYS[0], said_by(0))
            wait_for(partial(comes, store, KEYS[0], peer, 0), 30)
        assert store.get(KEYS[1], tiers=[peer]) is None
        with server(serve=address) as again:
            again.put(KEYS[2], said_by(7))
            wait_for(lambda: store.get(KEYS[2], tiers=[peer]) == said_by(7), 30)


def test_a_stranger_is_a_miss() -> None:
    secret = {"token": "known to one of them"}
    with server(storage_options={"host": secret}) as owner, reader("peer://") as store:
        owner.put(KEYS[0], said_by(0))
        assert store.get(KEYS[0], tiers=[peer_of(owner)]) is None
        assert "token" in store.stats().tier("peer-1").last_error
        with reader("peer://", options=secret) as friend:
            assert friend.get(KEYS[0], tiers=[peer_of(owner)]) == said_by(0)


def test_a_worker_that_dies_is_replaced_and_dials_again(owners: list[kvstore.Store]) -> None:
    peer = peer_of(owners[0])
    with reader("peer://", "&peers=1", engine="processes") as store:
        assert store._engine.pids == []  # nobody has named a peer
        wait_for(lambda: store.get(KEYS[0], tiers=[peer]) == said_by(0), 30)
        [pid] = store._engine.pids
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: store.get(KEYS[1], tiers=[peer]) == said_by(0), 30)
        assert store._engine.pids != [pid]


def test_a_peer_that_is_computing_can_be_asked_anew(owners: list[kvstore.Store]) -> None:
    peer, key = [peer_of(owners[0])], os.urandom(16)
    with reader("peer://") as store:
        wait_for(lambda: store.lookup([key], tiers=peer) == [Lookup.MISS])
        owners[0].put(key, bytes(CHUNK))
        assert store.lookup([key], tiers=peer) == [Lookup.MISS]
        wait_for(lambda: store.lookup([key], tiers=peer, anew=peer) == [Lookup.PENDING], 10)
