"""Batches of chunks from a peer: how they are asked for, and what becomes of them when it does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap

import pytest

from kvstore import Namespace, frame
from kvstore.backends.base import BackendContext
from kvstore.backends.peer import PeerBackend
from kvstore.errors import BackendError
from kvstore.peer import protocol
from kvstore.peer.protocol import Fetch
from kvstore.testing.backend import make_key

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")
import zmq

from support.peer_objects import Objects
from support.peers import CHUNK as SERVED
from support.peers import server as serving

CHUNK = 4096
CONTEXT = BackendContext(bytes(16), b"manifest", CHUNK)
KEYS = [make_key(number) for number in range(40)]
WINDOW = 6


class Asked(Objects):
    """Notes how many chunks each message asks for; one that is `mute` sends none."""

    def __init__(self, *, mute: bool = False) -> None:
        super().__init__(CONTEXT.manifest)
        self.mute = mute
        self.sizes: list[int] = []
        for key in KEYS:
            header, payload = bytearray(frame.HEADER_SIZE), key * 16
            frame.build(memoryview(header), memoryview(payload), key=key, fingerprint=bytes(16))
            self.objects[key] = bytes(header) + payload

    def _send(self, peer: bytes, fetch: Fetch) -> None:
        self.sizes.append(len(fetch.keys))
        if not self.mute:
            super()._send(peer, fetch)


@contextmanager
def connected(server: Asked, timeout: float = 60.0) -> Iterator[PeerBackend]:
    server.start()
    backend = PeerBackend(
        CONTEXT, f"127.0.0.1:{server.port}", timeout=timeout, concurrency=WINDOW, transport="zmq"
    )
    try:
        backend.open()
        yield backend
    finally:
        backend.close()
        server.end()


def slots() -> list[memoryview]:
    return [memoryview(mmap(-1, CHUNK)) for _ in KEYS]


def test_a_few_at_a_time_are_asked_for_and_several_at_once() -> None:
    server, outs = Asked(), slots()
    with connected(server) as backend:
        assert list(backend.read_many(KEYS, outs)) == [256] * len(KEYS)
    assert [bytes(out[:256]) for out in outs] == [key * 16 for key in KEYS]
    assert sum(server.sizes) == len(KEYS)
    assert all(WINDOW / 2 <= size <= WINDOW for size in server.sizes[:-1])


def test_an_early_end_leaves_nothing_under_way() -> None:
    server, outs = Asked(), slots()
    with connected(server) as backend:
        outcomes = backend.read_many(KEYS, outs)
        assert next(outcomes) == 256
        outcomes.close()
        before = [bytes(out) for out in outs]
        assert backend.exists(KEYS[:1]) == [True]
        assert [bytes(out) for out in outs] == before


def test_who_does_not_answer_in_time_is_not_asked_for_the_rest() -> None:
    server = Asked(mute=True)
    with connected(server, timeout=3.0) as backend:
        for outcome in backend.read_many(KEYS, slots()):
            assert isinstance(outcome, BackendError)
            assert "in time" in str(outcome)
            assert not outcome.retryable
        assert server.sizes == [WINDOW]


def test_without_a_connection_all_of_it_fails() -> None:
    backend = PeerBackend(CONTEXT, "127.0.0.1:9", transport="zmq")
    outcomes = list(backend.read_many(KEYS, slots()))
    assert len(outcomes) == len(KEYS)
    assert all(isinstance(outcome, BackendError) and outcome.retryable for outcome in outcomes)


def test_what_need_not_be_read_first_is_offered_together() -> None:
    """Each by itself while its checksum has to be computed; all of them, once the server knows it."""
    space = Namespace({}, SERVED)
    with serving() as owner, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        owner.put_many({key: key * 100 for key in KEYS[:8]})
        client.linger = 0
        client.rcvtimeo = 60_000
        client.connect(owner.served_at)
        hello = protocol.Hello(1, 1, bytes(16), space.fingerprint, SERVED, space.manifest, ["stream"])
        client.send(protocol.encode(hello))
        assert isinstance(protocol.decode_answer(client.recv()), protocol.Welcome)
        counts = []
        for number in (1, 2):
            client.send(protocol.encode(Fetch(1, number, KEYS[:8], 0, 20_000)))
            named: list[bytes] = []
            while len(named) < 8:
                control, headers = client.recv_multipart()
                offer = protocol.decode_answer(control)
                assert isinstance(offer, protocol.Offer)
                assert len(headers) == frame.HEADER_SIZE * len(offer.chunks)
                for place, (index, size, _) in enumerate(offer.chunks):
                    header = frame.parse(
                        memoryview(headers)[frame.HEADER_SIZE * place :][: frame.HEADER_SIZE]
                    )
                    assert (header.key, header.length) == (KEYS[index], size) == (KEYS[index], 1600)
                    named.append(header.key)
                counts.append(len(offer.chunks))
            assert sorted(named) == sorted(KEYS[:8])
        assert counts == [1] * 8 + [8]
