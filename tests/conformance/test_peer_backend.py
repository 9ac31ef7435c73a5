"""The backend of peers against the suite of backends, as far as it is about reading, by each transport."""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from mmap import mmap

import pytest

from kvstore.backends.base import Backend, BackendContext
from kvstore.backends.peer import PeerBackend
from kvstore.errors import BackendError, NamespaceMismatchError
from kvstore.peer import nixl_agent
from kvstore.peer.books import Parcel, Session
from kvstore.peer.choice import Choice
from kvstore.peer.limits import Bucket
from kvstore.peer.nixl_region import NixlRegion
from kvstore.peer.protocol import Hello
from kvstore.peer.session import ClientSession
from kvstore.peer.stream import StreamRegion
from kvstore.testing.backend import BackendTests, make_key
from support.peers import needs_nixl
from support.processes import wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")
from support.peer_objects import Objects

NOBODY = Session(b"", Hello(0, 1, bytes(16), bytes(16), 0, b"", []), Bucket(1.0))


class ReadingTests(BackendTests):
    """Reading; what would write does not apply."""

    transport: Choice
    server: Objects

    def make_server(self) -> Objects:
        """One that offers the transport under test."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        self.server = self.make_server()
        self.server.start()
        yield
        self.server.end()

    def make_backend(self, context: BackendContext) -> Backend:
        return PeerBackend(context, f"127.0.0.1:{self.server.port}", transport=self.transport)

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


class TestOverZmq(ReadingTests):
    """Payload beside the messages."""

    transport = "zmq"

    def make_server(self) -> Objects:
        return Objects(self.context.manifest)


class TestOverStream(ReadingTests):
    """Payload over a connection of its own."""

    transport = "zmq"

    def make_server(self) -> Objects:
        self.payloads: list[memoryview] = []
        region = StreamRegion("127.0.0.1", self.payloads.__getitem__)
        region.serve(lambda parcel: parcel.key != b"refused")

        def offer(payload: bytes) -> int:
            self.payloads.append(memoryview(payload))
            return region.offer(Parcel(NOBODY, 0, 0, self.key, len(self.payloads) - 1, len(payload), 0))

        self.key = b"held"
        return Objects(self.context.manifest, "stream", region.metadata, offer)

    def test_a_chunk_that_is_held_no_longer_is_a_failure(self, backend: Backend) -> None:
        """The server hangs up, and the next session begins anew."""
        self.raw_set(make_key(1), bytes(8192))
        out = memoryview(mmap(-1, self.context.chunk_size))
        self.key = b"refused"
        with pytest.raises(BackendError, match="hung up"):
            backend.read_into(make_key(1), out)
        assert backend.exists([make_key(1)]) == [True]

    def test_what_has_worked_and_fails_again_and_again_is_left(self, backend: Backend) -> None:
        """Chunks then come beside the messages, also when the peer is named anew."""
        assert isinstance(backend, PeerBackend)
        header, out = (memoryview(bytearray(size)) for size in (4096, self.context.chunk_size))
        key = make_key(1)
        self.raw_set(key, bytes(8192))
        assert backend.get_object(key, header, out) == 8192
        self.key = b"refused"
        for _ in range(3):
            with pytest.raises(BackendError, match="hung up"):
                backend.get_object(key, header, out)
        assert backend.get_object(key, header, out) == 8192
        backend.dial(f"127.0.0.1:{self.server.port}")
        assert backend.get_object(key, header, out) == 8192
        assert (backend.counters["peer_stream"], backend.counters["peer_zmq"]) == (1, 2)


def test_a_stream_that_stays_silent_fails_in_time_and_writes_nothing() -> None:
    context = ReadingTests.context
    payload = bytes(range(1, 251)) * 16
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = Objects(context.manifest, "stream", silent.getsockname()[1].to_bytes(2))
        server.objects[make_key(1)] = bytes(4096) + payload
        server.start()
        address = f"127.0.0.1:{server.port}"
        with closing(PeerBackend(context, address, timeout=1.0, transport="zmq")) as backend:
            backend.open()
            out = memoryview(mmap(-1, context.chunk_size))
            with pytest.raises(BackendError, match="did not send in time"):
                backend.read_into(make_key(1), out)
            connection, _ = silent.accept()
            connection.sendall(payload)
            assert backend.exists([make_key(1)]) == [True]
            connection.close()
            assert backend.exists([make_key(1)]) == [True]
            assert out == bytes(len(out))
        server.end()


@needs_nixl
class TestOverNixl(ReadingTests):
    """Payload read from the server's memory."""

    transport = "nixl"

    def make_server(self) -> Objects:
        self.memory = mmap(-1, 16 << 20)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.region = NixlRegion(self.base, len(self.memory), 1, is_local=True)

        def offer(payload: bytes) -> int:
            self.memory.write(payload)
            return self.base + self.memory.tell() - len(payload)

        return Objects(self.context.manifest, "nixl", self.region.metadata, offer)

    def test_memory_that_is_not_there_is_a_failure(self, backend: Backend) -> None:
        self.raw_set(make_key(1), bytes(8192))
        self.base += 1 << 40
        with pytest.raises(BackendError, match="NIXL"):
            backend.read_into(make_key(1), memoryview(mmap(-1, self.context.chunk_size)))


@pytest.mark.parametrize(
    ("choice", "transport", "metadata"),
    [
        ("zmq", "stream", (9).to_bytes(2)),
        ("zmq", "stream", bytes([255]) * 9),
        pytest.param("auto", "nixl", b"leads nowhere", marks=needs_nixl),
    ],
    ids=["stream", "no port", "nixl"],
)
def test_what_does_not_work_is_left(
    choice: Choice, transport: str, metadata: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = Objects(ReadingTests.context.manifest, transport, metadata)
    server.start()
    backend = PeerBackend(ReadingTests.context, f"127.0.0.1:{server.port}", transport=choice)
    with caplog.at_level(logging.WARNING, "kvstore"):
        backend.open()
        assert backend.exists([make_key(1)]) == [False]
    backend.close()
    server.end()
    [warning] = caplog.records
    assert f"is read without {transport}: " in warning.getMessage()


def test_a_connection_that_an_error_has_ended_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(session: ClientSession, data: bytes) -> None:
        raise RuntimeError("nobody has foreseen this")

    server = Objects(ReadingTests.context.manifest)
    server.start()
    with closing(PeerBackend(ReadingTests.context, f"127.0.0.1:{server.port}", transport="zmq")) as backend:
        backend.open()
        monkeypatch.setattr(ClientSession, "received", fail)
        with pytest.raises(BackendError, match="foreseen"):
            backend.exists([make_key(1)])
        monkeypatch.undo()
        assert backend.exists([make_key(1)]) == [False]
    server.end()


# Memory that nobody hands over: the agent of the server does nothing, as behind a filter.


@pytest.fixture
def idle_agent(monkeypatch: pytest.MonkeyPatch) -> nixl_agent.Agent:
    """It can only be reached over TCP, and never answers."""
    monkeypatch.setattr(nixl_agent, "_LOCAL", {"engine_config": "NET_DEVICES=lo,TLS=tcp"})
    return nixl_agent.Agent(has_thread=False, is_local=True)


@pytest.fixture
def silent(idle_agent: nixl_agent.Agent) -> Iterator[Objects]:
    """A server whose memory can only be read by that agent."""
    memory = mmap(-1, 1 << 20)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    idle_agent.register(base, len(memory))
    server = Objects(ReadingTests.context.manifest, "nixl", idle_agent.metadata, lambda payload: base)
    server.objects[make_key(1)] = bytes(8192)
    server.start()
    yield server
    server.end()


def get(backend: PeerBackend) -> int | None:
    out = memoryview(mmap(-1, ReadingTests.context.chunk_size))
    return backend.get_object(make_key(1), memoryview(bytearray(4096)), out)


@needs_nixl
def test_memory_that_stays_silent_is_left(silent: Objects, caplog: pytest.LogCaptureFixture) -> None:
    address = f"127.0.0.1:{silent.port}"
    with closing(PeerBackend(ReadingTests.context, address, timeout=1.0, transport="auto")) as backend:
        backend.open()
        with pytest.raises(BackendError, match="did not send in time"):
            get(backend)
        assert get(backend) == 8192
        backend.dial(address)
        assert get(backend) == 8192
        assert backend.counters["peer_zmq"] == 2
    [warning] = caplog.records
    assert "is read without nixl: it did not send in time" in warning.getMessage()


@needs_nixl
def test_what_may_still_be_written_to_is_not_answered(
    silent: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps the slot for as long; other chunks come meanwhile."""
    monkeypatch.setattr(nixl_agent.Agent, "release", lambda agent, handle: False)
    address = f"127.0.0.1:{silent.port}"
    with closing(PeerBackend(ReadingTests.context, address, timeout=1.0, transport="auto")) as backend:
        backend.open()
        waiting = threading.Thread(target=get, args=(backend,), daemon=True)
        waiting.start()
        wait_for(lambda: "nixl" in backend._opened.given_up)
        assert get(backend) == 8192
        assert waiting.is_alive()
    waiting.join(0.1)
    assert waiting.is_alive()


@needs_nixl
def test_a_failed_read_that_is_not_let_go_of_is_not_answered(
    silent: Objects, idle_agent: nixl_agent.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def keep(agent: nixl_agent.Agent, handle: int) -> bool:
        failed.set()
        return False

    monkeypatch.setattr(nixl_agent.Agent, "release", keep)
    address = f"127.0.0.1:{silent.port}"
    with closing(PeerBackend(ReadingTests.context, address, timeout=60.0, transport="nixl")) as backend:
        backend.open()
        waiting = threading.Thread(target=get, args=(backend,), daemon=True)
        waiting.start()
        wait_for(lambda: bool(backend._opened._reads))
        idle_agent.close()
        assert failed.wait(10)
        assert waiting.is_alive()
    waiting.join(0.1)
    assert waiting.is_alive()


# Memory of a process that does nothing for a while.

_SLEEPER = """
import ctypes, mmap, sys
from kvstore.peer import nixl_agent
from kvstore.peer.nixl_region import NixlRegion
nixl_agent._LOCAL = {"engine_config": "NET_DEVICES=lo,TLS=tcp"}
memory = mmap.mmap(-1, 1 << 16)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
region = NixlRegion(base, 1 << 16, 1, is_local=True)
print(base, region.metadata.hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """End it also while it is stopped."""
    try:
        yield
    finally:
        process.kill()


@needs_nixl
def test_what_was_answered_is_not_written_to_when_the_server_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_LOCAL", {"engine_config": "NET_DEVICES=lo,TLS=tcp"})
    with (
        subprocess.Popen(
            [sys.executable, "-c", _SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as sleeper,
        ending(sleeper),
    ):
        assert sleeper.stdout is not None
        base, metadata = sleeper.stdout.readline().split()
        place = int(base)
        server = Objects(
            ReadingTests.context.manifest, "nixl", bytes.fromhex(metadata), lambda payload: place
        )
        server.objects[make_key(1)] = bytes(8192)
        server.start()
        sleeper.send_signal(signal.SIGSTOP)
        address = f"127.0.0.1:{server.port}"
        with closing(PeerBackend(ReadingTests.context, address, timeout=1.0, transport="nixl")) as backend:
            backend.open()
            slot = memoryview(mmap(-1, ReadingTests.context.chunk_size))
            with pytest.raises(BackendError, match="did not send in time"):
                backend.get_object(make_key(1), memoryview(bytearray(4096)), slot)
            slot[:] = b"Z" * len(slot)  # another chunk has it now
            sleeper.send_signal(signal.SIGCONT)
            for _ in range(5):  # an agent that had the first read would go on with it
                wait_for(lambda: reads(backend), timeout=60)
            assert bytes(slot) == b"Z" * len(slot)
        server.end()


def reads(backend: PeerBackend) -> bool:
    try:
        return get(backend) == 8192
    except BackendError:
        return False
