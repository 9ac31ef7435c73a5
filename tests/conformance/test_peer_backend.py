"""The backend of peers against the suite of backends, as far as it is about reading.

The server here is a thread that speaks the protocol and sends whatever bytes it was given as objects: also
such as no server of ours would send.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore import frame
from kvstore.backends.base import Backend, BackendContext
from kvstore.backends.peer import PeerBackend
from kvstore.errors import BackendError, NamespaceMismatchError
from kvstore.peer.protocol import (
    HERE,
    MISSING,
    VERSION,
    Chunk,
    Fetch,
    Found,
    Hello,
    Lookup,
    Message,
    Missing,
    Refused,
    Welcome,
    decode_request,
    encode,
)
from kvstore.testing.backend import BackendTests, make_key

zmq = pytest.importorskip("zmq", reason="no pyzmq (pip install 'kvstore-tiers[p2p]')")


class Objects(threading.Thread):
    """Serves a dict of objects."""

    def __init__(self, manifest: bytes) -> None:
        super().__init__(daemon=True)
        self.manifest = manifest
        self.objects: dict[bytes, bytes] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind("inproc://end")
        self._ear = self._context.socket(zmq.PAIR)
        self._ear.connect("inproc://end")

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ear, zmq.POLLIN)
        while self._ear not in dict(poller.poll()):
            peer, data = self._socket.recv_multipart()
            request = decode_request(data)
            if isinstance(request, Hello):
                self._greet(peer, request)
            elif isinstance(request, Lookup):
                states = bytes(HERE if key in self.objects else MISSING for key in request.keys)
                self._say(peer, Found(request.session, request.id, states))
            elif isinstance(request, Fetch):
                self._send(peer, request)
        self._socket.close()
        self._ear.close()

    def end(self) -> None:
        self._bell.send(b"")
        self.join()
        self._bell.close()
        self._context.term()

    def _greet(self, peer: bytes, hello: Hello) -> None:
        if hello.manifest == self.manifest:
            self._say(peer, Welcome(hello.session, VERSION, b"", "zmq"))
        else:
            self._say(peer, Refused(hello.session, "namespace", "manifest: found another"))

    def _send(self, peer: bytes, fetch: Fetch) -> None:
        for index, key in enumerate(fetch.keys):
            data = self.objects.get(key)
            if data is None:
                self._say(peer, Missing(fetch.session, fetch.id, [index]))
                continue
            control = encode(Chunk(fetch.session, fetch.id, index, len(data)))
            header, payload = data[: frame.HEADER_SIZE], data[frame.HEADER_SIZE :]
            self._socket.send_multipart([peer, control, header, payload])

    def _say(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, encode(message)])


class TestPeer(BackendTests):
    """Reading; what would write does not apply."""

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        self.server = Objects(self.context.manifest)
        self.server.start()
        yield
        self.server.end()

    def make_backend(self, context: BackendContext) -> Backend:
        return PeerBackend(context, f"127.0.0.1:{self.server.port}")

    def raw_get(self, key: bytes) -> bytes | None:
        return self.server.objects.get(key)

    def raw_set(self, key: bytes, data: bytes) -> None:
        self.server.objects[key] = data

    def raw_list(self) -> list[str]:
        return [key.hex() for key in self.server.objects]

    test_reads_what_it_wrote = None
    test_chunk_size_need_not_be_aligned = None
    test_takes_keys_of_every_length = None
    test_object_is_frame_and_payload = None
    test_leaves_nothing_but_objects = None
    test_deleted_is_a_miss = None
    test_second_writer_changes_nothing = None
    test_of_racing_writers_one_wins = None
    test_readers_see_whole_objects_or_none = None
    test_quarantine_makes_room = None
    test_scan_lists_every_object = None
    test_objects_survive_reopening = None

    def test_absent_is_a_miss(self, backend: Backend) -> None:
        assert backend.exists([make_key(1)]) == [False]
        assert backend.exists([]) == []
        assert backend.read_into(make_key(1), memoryview(bytearray(self.context.chunk_size))) is None

    def test_another_manifest_is_refused(self, backend: Backend) -> None:
        impostor = self.make_backend(BackendContext(self.context.fingerprint, b"another", 64 << 10))
        with pytest.raises(NamespaceMismatchError, match="manifest"):
            impostor.open()
        impostor.close()

    def test_it_is_only_read(self, backend: Backend) -> None:
        slot = memoryview(bytearray(64))
        for verb in (lambda: backend.write(make_key(1), slot), lambda: backend.delete([]), backend.scan):
            with pytest.raises(BackendError, match="only read"):
                verb()

    def test_thousands_of_keys_are_asked_for_at_once(self, backend: Backend) -> None:
        keys = [make_key(number) for number in range(3000)]
        self.server.objects = dict.fromkeys(keys[::3], b"")
        assert backend.exists(keys) == [number % 3 == 0 for number in range(3000)]

    def test_it_can_be_opened_again(self) -> None:
        backend = self.make_backend(self.context)
        for _ in range(3):
            backend.open()
            assert backend.exists([make_key(1)]) == [False]
        backend.close()
