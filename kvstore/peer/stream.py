"""Payload over a TCP connection of its own, from the server's slot to the client's with one copy on each
side; a message of ZMQ would be copied once more by the client.

1. The server listens on a port that the system draws, and tells it those whose session is open.
2. For a chunk the client gets a *ticket*, 8 random bytes, in an ``Offer``. It sends the ticket.
3. The server answers with the payload, and nothing else, in the order of the tickets. A ticket is good once,
   and as long as the session that it was given to holds the slot; at any other the server hangs up.
4. Whoever has shown no ticket within seconds gives up the place. A client whose server has hung up while it
   wanted nothing connects again when it does.

Who owns what: the server has a thread that accepts and one for each connection, which only look at what the
hub's thread owns. The client's side belongs to the thread that uses it.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import randbits
from typing import TYPE_CHECKING

from ..frame import RunningDigest
from .books import Parcel
from .transport import STREAM, Read, Reader, Region, Tag, Wanted

if TYPE_CHECKING:
    import zmq

__all__ = ["StreamReader", "StreamRegion"]

#: Bytes of each.
_PORT, _TICKET = 2, 8
#: Tickets that nobody has shown, before those that are good no longer are thrown away.
_MANY = 4096
#: Connections at a time.
_MOST = 256
#: Seconds that the client of a chunk may take it in, and after which a connection without an answer is dead.
_PATIENCE = 30.0
#: Seconds within which a connection has to show its first ticket.
_FIRST = 5.0
#: Seconds that a server may take to accept.
_CONNECT = 0.5
#: Seconds until the server tries again to accept, while it has no descriptors left.
_PAUSE = 0.1
#: Bytes that are taken in before their checksum is computed, while they are in the processor's cache.
_PIECE = 256 << 10
#: Bytes that have to be there before the client wakes, unless it waits for less; each time costs it a turn.
_ENOUGH = 1 << 20
#: Bytes of whole chunks that the client takes in before it tells of them, if they come without a pause.
_TOLD = 4 << 20


class StreamRegion(Region):
    """Slots of an arena, at `host`.

    Parameters
    ----------
    host : str
    view : callable
        ``view(slot)``: memory of one slot.

    Raises
    ------
    OSError
        It cannot listen there.
    """

    def __init__(self, host: str, view: Callable[[int], memoryview]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.metadata = self._listener.getsockname()[1].to_bytes(_PORT)
        self._view = view
        self._tickets: dict[int, Parcel] = {}
        self._places = threading.Semaphore(_MOST)

    def serve(self, is_wanted: Callable[[Parcel], bool]) -> None:
        """Begin to accept; `is_wanted` says whether a chunk is still held for whom it was offered to."""
        self._is_wanted = is_wanted
        threading.Thread(target=self._accept, name="kvstore-stream", daemon=True).start()

    def offer(self, parcel: Parcel) -> int:
        if len(self._tickets) >= _MANY:
            for ticket, other in self._tickets.copy().items():  # meanwhile others are shown
                if not self._is_wanted(other):
                    self._tickets.pop(ticket, None)
        ticket = randbits(63)
        self._tickets[ticket] = parcel
        return ticket

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # whoever connected has gone already, or there is no room for anybody
                time.sleep(_PAUSE)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            except RuntimeError:  # the system has no threads left
                self._places.release()
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError), connection:
                connection.settimeout(None)
                self._converse(connection)
        finally:
            self._places.release()

    def _converse(self, connection: socket.socket) -> None:
        _keep_alive(connection)
        _let_fail(connection, socket.SO_SNDTIMEO, _PATIENCE)
        _let_fail(connection, socket.SO_RCVTIMEO, _FIRST)
        while len(shown := connection.recv(_TICKET, socket.MSG_WAITALL)) == _TICKET:
            parcel = self._tickets.pop(int.from_bytes(shown), None)
            if parcel is None or not self._is_wanted(parcel):
                break
            if connection.send(self._view(parcel.slot)[: parcel.size]) < parcel.size:
                break
            _let_fail(connection, socket.SO_RCVTIMEO, 0.0)


@dataclass(eq=False)
class _Reading:
    """A chunk of `size` bytes, and what of `out` has not come."""

    tag: Tag
    out: memoryview
    size: int
    digest: RunningDigest = field(default_factory=RunningDigest)
    dropped: bool = False


class StreamReader(Reader):
    """Reads from a server at `host`."""

    name = STREAM

    def __init__(self, host: str) -> None:
        self._host = host
        self._port = 0
        self._socket: socket.socket | None = None
        self._poller: zmq.Poller | None = None
        self._reads: deque[_Reading] = deque()
        self._ended: list[Read] = []
        self._nowhere = memoryview(bytearray(_PIECE))
        self._due = 0  # bytes that are to come
        self._enough = 1

    def attach(self, poller: zmq.Poller) -> None:
        self._poller = poller

    def connect(self, metadata: bytes) -> None:
        self.disconnect()
        if len(metadata) != _PORT:
            raise ConnectionError(f"a port has {_PORT} bytes, not {len(metadata)}")
        self._port = int.from_bytes(metadata)
        self._connect()

    def start(self, wanted: Sequence[Wanted]) -> None:
        self._reads.extend(_Reading(read.tag, read.out, len(read.out)) for read in wanted)
        tickets = b"".join([read.address.to_bytes(_TICKET) for read in wanted])
        try:
            connection = self._socket or self._connect()
            if connection.send(tickets) < len(tickets):
                raise ConnectionError("the server has hung up")
            self._due += sum([len(read.out) for read in wanted])
            self._wake_at(connection)
        except OSError as error:
            self._fail(str(error))

    def finished(self) -> list[Read]:
        whole = 0
        try:
            while self._socket is not None and whole < _TOLD:
                whole += self._take(self._socket)
                self._wake_at(self._socket)
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(str(error))
        ended, self._ended = self._ended, []
        return ended

    def drop(self, tag: Tag) -> bool:
        for reading in self._reads:
            if reading.tag == tag:
                reading.dropped = True
        return True

    def disconnect(self) -> list[Tag]:
        self._hang_up()
        self._reads.clear()
        self._ended.clear()
        return []

    def close(self) -> None:
        self.disconnect()

    def _connect(self) -> socket.socket:
        self._socket = connection = socket.create_connection((self._host, self._port), _CONNECT)
        _keep_alive(connection)
        connection.setblocking(False)
        if self._poller is not None:
            self._poller.register(connection, 1)  # zmq.POLLIN
        return connection

    def _wake_at(self, connection: socket.socket) -> None:
        """Have the poller wake when enough is there."""
        enough = min(max(1, self._due), _ENOUGH)
        if enough != self._enough:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            self._enough = enough

    def _take(self, connection: socket.socket) -> int:
        """Take in a piece; bytes of the chunk of which that was the last, 0 if it was not."""
        reading = self._reads[0] if self._reads else _Reading((0, 0), self._nowhere[:1], 0)
        size = min(_PIECE, len(reading.out))
        piece = (self._nowhere if reading.dropped else reading.out)[:size]
        count = connection.recv_into(piece)
        if not count or not self._reads:
            raise ConnectionError("the server has hung up")
        self._due -= count
        if not reading.dropped:
            reading.digest.update(piece[:count])
        reading.out = reading.out[count:]
        if reading.out:
            return 0
        self._reads.popleft()
        if not reading.dropped:
            self._ended.append(Read(reading.tag, digest=reading.digest.digest()))
        return reading.size

    def _fail(self, why: str) -> None:
        self._ended += [Read(reading.tag, error=why) for reading in self._reads if not reading.dropped]
        self._reads.clear()
        self._hang_up()

    def _hang_up(self) -> None:
        connection, self._socket = self._socket, None
        self._due, self._enough = 0, 1
        if connection is not None:
            if self._poller is not None:
                self._poller.unregister(connection)
            connection.close()


def _keep_alive(connection: socket.socket) -> None:
    """Notice when the other side is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_PATIENCE * 1000))


def _let_fail(connection: socket.socket, direction: int, seconds: float) -> None:
    """Let a blocking call end after so long, 0 for never, with as much as it could do until then; unlike one
    of a socket with a timeout it is one system call."""
    whole, part = divmod(round(seconds * 1e6), 1_000_000)
    connection.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", whole, part))
