"""The connection of payload by itself: places, tickets, and what happens when the system has nothing left."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.peer import stream
from kvstore.peer.books import Parcel, Session
from kvstore.peer.limits import Bucket
from kvstore.peer.protocol import Hello
from kvstore.peer.stream import StreamReader, StreamRegion
from kvstore.peer.transport import Read, Wanted
from support.processes import wait_for

NOBODY = Session(b"", Hello(0, 1, bytes(16), bytes(16), 0, b"", []), Bucket(1.0))
PAYLOAD = bytes(range(256))
HELD = Parcel(NOBODY, 0, 0, b"held", 0, len(PAYLOAD), 0)
FREED = Parcel(NOBODY, 0, 0, b"freed", 0, len(PAYLOAD), 0)


def is_held(parcel: Parcel) -> bool:
    return parcel is HELD


@pytest.fixture
def one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MOST", 1)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ticket has to come at once."""
    monkeypatch.setattr(stream, "_FIRST", 0.05)


def serve(is_wanted: Callable[[Parcel], bool] = is_held) -> StreamRegion:
    region = StreamRegion("127.0.0.1", lambda slot: memoryview(PAYLOAD))
    region.serve(is_wanted)
    return region


def connect(region: StreamRegion) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int.from_bytes(region.metadata)), timeout=10)


def show(connection: socket.socket, ticket: int) -> bytes:
    """What comes for a ticket; nothing when the server hangs up."""
    try:
        connection.sendall(ticket.to_bytes(8))
        return connection.recv(len(PAYLOAD), socket.MSG_WAITALL)
    except ConnectionError:
        return b""


def is_served(region: StreamRegion) -> bool:
    with connect(region) as connection:
        return show(connection, region.offer(HELD)) == PAYLOAD


# Places.


def test_who_shows_no_ticket_gives_up_the_place(one_place: None, hurried: None) -> None:
    region = serve()
    with connect(region) as idle:
        assert idle.recv(1) == b""
    wait_for(lambda: is_served(region))


def test_who_has_shown_one_keeps_it(hurried: None) -> None:
    region = serve()
    with connect(region) as known, connect(region) as idle:
        assert show(known, region.offer(HELD)) == PAYLOAD
        assert idle.recv(1) == b""  # and that long `known` has been idle, too
        with connect(region) as another:
            assert another.recv(1) == b""
        assert show(known, region.offer(HELD)) == PAYLOAD


def test_a_ticket_may_come_in_parts() -> None:
    region = serve()
    with connect(region) as connection:
        first, *rest = region.offer(HELD).to_bytes(8)
        connection.sendall(bytes([first]))
        assert not select.select([connection], [], [], 0.05)[0]
        connection.sendall(bytes(rest))
        assert connection.recv(len(PAYLOAD), socket.MSG_WAITALL) == PAYLOAD


@pytest.fixture
def reader(hurried: None) -> Iterator[tuple[StreamReader, StreamRegion]]:
    region = serve()
    reader = StreamReader("127.0.0.1")
    reader.connect(region.metadata)
    yield reader, region
    reader.close()


def read(reader: StreamReader, ticket: int) -> tuple[Read, bytes]:
    out = memoryview(bytearray(len(PAYLOAD)))
    reader.start([Wanted((1, 0), ticket, out)])
    ended: list[Read] = []
    wait_for(lambda: ended.extend(reader.finished()) or bool(ended))  # type: ignore[func-returns-value]
    return ended[0], out.tobytes()


def test_a_reader_that_was_idle_connects_again(reader: tuple[StreamReader, StreamRegion]) -> None:
    client, region = reader
    assert client._socket is not None
    assert select.select([client._socket], [], [], 10)[0], "the server has not hung up"
    assert client.finished() == []
    outcome, payload = read(client, region.offer(HELD))
    assert (outcome.error, payload) == ("", PAYLOAD)


# What the system may refuse.


def test_without_descriptors_it_waits_before_it_accepts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    enough = threading.Event()

    class Listener:
        def accept(self) -> None:
            tries.append(time.monotonic())
            if len(tries) >= 3:
                enough.set()
            raise OSError(errno.EMFILE, "Too many open files")

    region = StreamRegion("127.0.0.1", lambda slot: memoryview(PAYLOAD))
    monkeypatch.setattr(stream, "_PAUSE", 0.05)
    region._listener.close()
    monkeypatch.setattr(region, "_listener", Listener())
    region.serve(is_held)
    assert enough.wait(10)
    monkeypatch.setattr(stream, "_PAUSE", 60.0)  # for the rest of the thread's life
    assert tries[2] - tries[0] >= 0.1


def test_without_threads_a_place_is_not_lost(one_place: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    region = serve()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with connect(region) as connection:
            assert connection.recv(1) == b""
    wait_for(lambda: is_served(region))


def test_an_error_does_not_cost_a_place(one_place: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)

    def fail_once(parcel: Parcel) -> bool:
        if not ended:
            raise RuntimeError("nobody has foreseen this")
        return True

    region = serve(fail_once)
    assert not is_served(region)
    wait_for(lambda: bool(ended))
    wait_for(lambda: is_served(region))


# Tickets.


def test_what_is_shown_while_others_are_thrown_away_is_good_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MANY", 2)
    sweeper = threading.current_thread()
    seen: list[bytes] = []

    def is_wanted(parcel: Parcel) -> bool:
        if threading.current_thread() is sweeper and not seen:
            with connect(region) as connection:
                seen.append(show(connection, good))
        return parcel is HELD

    region = serve(is_wanted)
    region.offer(FREED)
    good = region.offer(HELD)
    region.offer(HELD)  # there are too many now
    assert seen == [PAYLOAD]
    with connect(region) as connection:
        assert show(connection, good) == b""
    assert len(region._tickets) == 1
