"""Two stores on the loopback interface, with everything that can become of one of them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from mmap import mmap

import pytest

import kvstore
from kvstore import BackendError, ConfigError, Lookup, NamespaceMismatchError
from kvstore.backends import create
from kvstore.config import TierConfig
from kvstore.namespace import Namespace
from kvstore.peer import protocol
from support.object_store import free_ports
from support.peers import CHUNK, evict, gate_of, no_leases, peer_of, reader, server
from support.processes import has_ended, wait_for

zmq = pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

DATA = {bytes([number]) * 16: os.urandom(CHUNK - 100 * number) for number in range(1, 17)}
KEYS = list(DATA)
ENGINES = ["threads", "processes"]


@pytest.fixture
def owner() -> Iterator[kvstore.Store]:
    """A store that serves `DATA`."""
    with server() as store:
        store.put_many(DATA)
        yield store


def serving_process(store: kvstore.Store) -> int:
    wait_for(lambda: store.stats() and [link.up for link in gate_of(store)._links.values()] == [True])
    (pid,) = gate_of(store).pids
    return pid


def comes(owner: kvstore.Store, store: kvstore.Store) -> bool:
    """Whether a chunk that nobody has asked for yet comes over."""
    key = os.urandom(16)
    owner.put(key, key)
    return store.get(key, timeout=5) == key


# What works.


@pytest.mark.parametrize("engine", ENGINES)
def test_chunks_come_over(owner: kvstore.Store, engine: str) -> None:
    with reader(peer_of(owner), engine=engine) as store:
        absent = bytes([99]) * 16
        assert store.get_many([*KEYS, absent]) == DATA
        tier = store.stats().tier("peer")
        assert tier.counters["reads"] == tier.custom["peer_stream"] == len(DATA)
    no_leases(owner)
    wait_for(lambda: owner.stats().host.custom.get("peer_chunks") == len(DATA))


def test_lookups_are_answered_without_moving_anything(owner: kvstore.Store) -> None:
    with reader(peer_of(owner)) as store:
        wait_for(lambda: store.lookup(KEYS) == [Lookup.PENDING] * len(KEYS))
        wait_for(lambda: store.lookup([bytes([99]) * 16]) == [Lookup.MISS])
        assert store.stats().host.chunks == 0
        assert owner.stats().leased == 0


def test_more_than_a_peer_may_hold_at_a_time() -> None:
    with server(slots=256) as owner, reader(peer_of(owner), "&concurrency=256", slots=256) as store:
        data = {number.to_bytes(16): number.to_bytes(2) * 300 for number in range(200)}
        owner.put_many(data)
        assert store.get_many(list(data)) == data
        no_leases(owner)


def test_empty_and_whole_chunks(owner: kvstore.Store) -> None:
    data = {b"e" * 16: b"", b"w" * 16: bytes(CHUNK)}
    owner.put_many(data)
    with reader(peer_of(owner)) as store:
        assert store.get_many(list(data)) == data


def test_what_is_being_filled_is_waited_for(owner: kvstore.Store) -> None:
    key = b"f" * 16
    with reader(peer_of(owner)) as store, owner.reserve([key]) as lease:
        wait_for(lambda: store.lookup([key]) == [Lookup.PENDING])
        job = store.prefetch([key])
        wait_for(
            lambda: (
                gate_of(owner)._links and any(link.books._waiting for link in gate_of(owner)._links.values())
            )
        )
        lease[key][:] = bytes([7]) * CHUNK
        lease.commit()
        assert job.result(timeout=10).promoted == (key,)
        assert store.get(key) == bytes([7]) * CHUNK
    no_leases(owner)


def test_what_is_waited_for_in_vain_is_a_miss(owner: kvstore.Store) -> None:
    aborted, never = b"a" * 16, b"n" * 16
    with reader(peer_of(owner), "&timeout=1s") as store, owner.reserve([never]) as open_lease:
        with owner.reserve([aborted]) as lease:
            wait_for(lambda: store.lookup([aborted, never]) == [Lookup.PENDING] * 2)
            job = store.prefetch([aborted, never])
            lease.abort()
        assert job.result(timeout=10).missing == (aborted, never)
        tier = store.stats().tier("peer")
        assert (tier.errors, tier.timeouts, tier.breaker.read) == (0, 0, "closed")
        open_lease.abort()
    no_leases(owner)


def test_two_stores_read_each_other() -> None:
    [port] = free_ports(1)
    with (
        reader(f"peer://127.0.0.1:{port}", "&required=false&timeout=1s", serve="tcp://127.0.0.1:0") as first,
        reader(peer_of(first), serve=f"tcp://127.0.0.1:{port}") as second,
    ):
        first.put(KEYS[0], b"of the first")
        second.put(KEYS[1], b"of the second")
        assert second.get(KEYS[0]) == b"of the first"
        wait_for(lambda: comes(second, first))


def test_deleted_and_stored_anew_while_it_is_sent(owner: kvstore.Store) -> None:
    """Whatever arrives is one version or another, whole."""
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number = (number + 1) % 256
            owner.delete(KEYS)
            owner.put_many({key: bytes([number]) * CHUNK for key in KEYS})

    changer = threading.Thread(target=change)
    backend = create(TierConfig(url=peer_of(owner)), owner.namespace)
    out = memoryview(mmap(-1, CHUNK))
    with closing(backend):
        backend.open()
        changer.start()
        try:
            seen = set()
            while len(seen) < 50:
                for key in KEYS:
                    if (size := backend.read_into(key, out)) is not None and out[:size] != DATA[key]:
                        assert out == out[:1].tobytes() * CHUNK
                        seen.add(out[0])
        finally:
            stop.set()
            changer.join()
    no_leases(owner)


# Who may.


def test_another_namespace_is_refused_with_its_fields(owner: kvstore.Store) -> None:
    with pytest.raises(NamespaceMismatchError, match="model"):
        reader(peer_of(owner), namespace={"model": "other"})
    with pytest.raises(NamespaceMismatchError, match="chunk_size"):
        reader(peer_of(owner), chunk_size=2 * CHUNK)


def test_a_shared_token() -> None:
    secret = {"token": "a token that both know"}
    with server(storage_options={"host": secret}) as owner:
        owner.put_many(DATA)
        with pytest.raises(ConfigError, match="token"):
            reader(peer_of(owner))
        with pytest.raises(ConfigError, match="token"):
            reader(peer_of(owner), options={"token": "a token that is wrong"})
        with reader(peer_of(owner), options=secret) as store:
            assert store.get(KEYS[0]) == DATA[KEYS[0]]


def test_curve_keys() -> None:
    (server_public, server_secret), (public, secret), (strange_public, strange_secret) = (
        tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(3)
    )
    asks = {"curve_secret_key": server_secret, "allowed_keys": [public]}
    with server(storage_options={"host": asks}) as owner:
        owner.put_many(DATA)
        shows = {"curve_server_key": server_public, "curve_public_key": public, "curve_secret_key": secret}
        with reader(peer_of(owner), options=shows, engine="processes") as store:
            assert store.get_many(KEYS) == DATA
            custom = store.stats().tier("peer").custom
            assert custom == {"peer_zmq": len(DATA)}, "nothing goes past the encryption"
        strange = {**shows, "curve_public_key": strange_public, "curve_secret_key": strange_secret}
        for options in (strange, {}):
            with pytest.raises(BackendError, match=r"connection|answer"):
                reader(peer_of(owner), "&timeout=1s", options=options)


def test_serving_others_without_authentication_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvstore"):
        with server(serve="tcp://127.0.0.1:0"):
            assert not caplog.records
        with server(serve="tcp://0.0.0.0:0", storage_options={"host": {"token": "0123456789abcdef"}}):
            assert not caplog.records
        with server(serve="tcp://0.0.0.0:0"):
            assert "without authentication" in caplog.text


def test_strangers_cannot_crash_it(owner: kvstore.Store) -> None:
    address = owner.served_at
    assert address is not None
    host, port = address.removeprefix("tcp://").split(":")
    pid = serving_process(owner)
    for _ in range(20):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(os.urandom(3000))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 1000
        stranger.connect(address)
        for _ in range(50):
            stranger.send(os.urandom(100))
            stranger.send_multipart([b"a", b"b", b"c"])
        with reader(peer_of(owner)) as store:
            assert store.get_many(KEYS) == DATA
    assert gate_of(owner).pids == [pid]
    wait_for(lambda: owner.stats().host.custom.get("peer_malformed", 0) >= 100)


def test_tickets_are_good_once_and_while_the_chunk_is_held(owner: kvstore.Store) -> None:
    """The connection that carries payload gives nothing to those who have guessed, or kept, a ticket."""
    space = Namespace({}, CHUNK)
    pid = serving_process(owner)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(owner.served_at)
        hello = protocol.Hello(1, 1, bytes(16), space.fingerprint, CHUNK, space.manifest, ["stream"])
        client.send(protocol.encode(hello))
        welcome = protocol.decode_answer(client.recv())
        assert isinstance(welcome, protocol.Welcome)

        def show(ticket: int) -> bytes:
            with socket.create_connection(("127.0.0.1", int.from_bytes(welcome.metadata))) as stream:
                stream.sendall(ticket.to_bytes(8))
                stream.shutdown(socket.SHUT_WR)
                with stream.makefile("rb") as answer:
                    return answer.read()

        client.send(protocol.encode(protocol.Fetch(1, 1, KEYS[:2], 0, 20_000)))
        tickets = dict.fromkeys(KEYS[:2], 0)
        while not all(tickets.values()):
            control, _ = client.recv_multipart()
            offer = protocol.decode_answer(control)
            assert isinstance(offer, protocol.Offer)
            tickets.update({KEYS[index]: address for index, _, address in offer.chunks})
        assert show(tickets[KEYS[0]] ^ 1) == b""
        assert show(tickets[KEYS[0]]) == DATA[KEYS[0]]
        assert show(tickets[KEYS[0]]) == b"", "it was good once"
        client.send(protocol.encode(protocol.Cancel(1, 1)))
        no_leases(owner)
        assert show(tickets[KEYS[1]]) == b"", "the chunk is not held any more"
    assert gate_of(owner).pids == [pid]


# What can go wrong.


def test_an_address_that_is_taken(owner: kvstore.Store) -> None:
    assert owner.served_at is not None
    with pytest.raises(BackendError, match="cannot serve.*[Aa]ddress"):
        server(serve=owner.served_at)


def test_nobody_listens() -> None:
    with pytest.raises(BackendError, match="no connection"):
        reader("peer://127.0.0.1:9", "&timeout=500ms")
    with reader("peer://127.0.0.1:9", "&timeout=500ms&required=false") as store:
        assert store.get(KEYS[0]) is None


def test_the_serving_process_is_killed(owner: kvstore.Store) -> None:
    with reader(peer_of(owner), "&timeout=2s") as store:
        assert store.get(KEYS[0]) == DATA[KEYS[0]]
        pid = serving_process(owner)
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid, 5)
        wait_for(lambda: comes(owner, store))
        assert serving_process(owner) != pid
        assert owner.stats().host.custom["peer_deaths"] == 1
    no_leases(owner)


def test_the_serving_process_is_killed_while_it_has_leases(owner: kvstore.Store) -> None:
    """The one who reads is stopped, so that nothing is acknowledged."""
    with reader(peer_of(owner), engine="processes") as store:
        (worker,) = store._engine.pids
        store.get(KEYS[0])
        os.kill(worker, signal.SIGSTOP)
        job = store.prefetch(KEYS)
        os.kill(worker, signal.SIGCONT)
        os.kill(serving_process(owner), signal.SIGKILL)
        outcome = job.result(timeout=30)
        assert set(outcome.promoted) | set(outcome.missing) | set(outcome.skipped) == set(KEYS)
        found = store.get_many(KEYS)
        assert found == {key: DATA[key] for key in found}
    no_leases(owner)


def test_a_peer_that_is_killed_with_leases_gives_them_back(owner: kvstore.Store) -> None:
    """A client that never acknowledges: its leases end with its patience."""
    space = Namespace({}, CHUNK)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(owner.served_at)
        hello = protocol.Hello(1, 1, bytes(16), space.fingerprint, CHUNK, space.manifest, ["zmq"])
        client.send(protocol.encode(hello))
        assert isinstance(protocol.decode_answer(client.recv()), protocol.Welcome)
        client.send(protocol.encode(protocol.Fetch(1, 1, KEYS[:5], 0, 5000)))
        for _ in range(5):
            control, _, payload = client.recv_multipart()
            chunk = protocol.decode_answer(control)
            assert isinstance(chunk, protocol.Chunk)
            assert payload == DATA[KEYS[chunk.index]]
        assert gate_of(owner).leases == owner.stats().leased == 5
        owner.delete(KEYS[:2])
        assert owner.stats().leased == 3, "what is deleted goes with the lease"
    no_leases(owner, timeout=10)


def test_a_hung_serving_process_is_replaced(owner: kvstore.Store) -> None:
    with reader(peer_of(owner), "&timeout=1s&retries=0") as store:
        assert store.get(KEYS[0]) == DATA[KEYS[0]]
        pid = serving_process(owner)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        assert store.get(KEYS[1], timeout=5) is None
        assert time.monotonic() - started < 4
        assert has_ended(pid, 15), "it gave no sign of life"
        wait_for(lambda: comes(owner, store))
    no_leases(owner)


def test_the_owner_is_killed_and_starts_again_with_another_arena() -> None:
    [port] = free_ports(1)
    with reader(f"peer://127.0.0.1:{port}", "&timeout=1s&required=false") as store:
        for slots in (4, 8):
            program = (
                "import kvstore, sys, time\n"
                f"store = kvstore.open('ram://?capacity={slots * CHUNK}&pin=off', chunk_size={CHUNK}, "
                f"serve='tcp://127.0.0.1:{port}')\n"
                f"store.put({KEYS[slots]!r}, b'{slots}' * 1000)\n"
                "print('up', flush=True); time.sleep(60)\n"
            )
            with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
                assert owner.stdout is not None
                assert owner.stdout.readline() == b"up\n"
                wait_for(lambda: store.get(KEYS[slots]) is not None)  # noqa: B023
                assert store.get(KEYS[slots]) == b"%d" % slots * 1000
                owner.kill()
            evict(store)
            assert store.get(KEYS[slots], timeout=5) is None


def test_it_serves_while_the_owner_is_busy_or_idle(owner: kvstore.Store) -> None:
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            owner.poll()

    with reader(peer_of(owner)) as store:
        assert store.get_many(KEYS[:8]) == {key: DATA[key] for key in KEYS[:8]}
        caller = threading.Thread(target=poll)
        caller.start()
        try:
            assert store.get_many(KEYS) == DATA
        finally:
            stop.set()
            caller.join()


def test_nothing_is_left_of_it() -> None:
    with server() as owner:
        pid = serving_process(owner)
    assert has_ended(pid, 5)


def test_a_peer_is_only_read() -> None:
    with pytest.raises(ConfigError, match="'write' is no option of peer"):
        reader("peer://127.0.0.1:9", "&write=through")
    with pytest.raises(ConfigError, match="'capacity' is no option of peer"):
        reader("peer://127.0.0.1:9", "&capacity=1GiB")
    with pytest.raises(ConfigError, match="not an address"):
        reader("peer://somewhere")
