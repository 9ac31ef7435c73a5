"""The loop of a serving process: between peers, who ask, and the owner of the arena, who knows.

One thread. Each round hears the owner and the peers, lets the hub decide, and sends what it says; at most one
chunk a round that has to be read, so that a question never waits behind more than one. While the owner takes
nothing in, no peer is heard either, so that nothing piles up here.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import zmq

from .. import frame
from .books import Parcel
from .hub import Hub
from .link import BEAT, LINK_LIMIT, Beat, FromServer, Release, decode_from_owner
from .link import encode as encode_link
from .protocol import MOST_OFFERS, Chunk, Offer, encode
from .transport import Region, ServerCarrier

__all__ = ["Server"]

_HEADER = frame.HEADER_SIZE
#: Messages of peers that are heard in one round.
_ROUND = 64
#: Messages that wait for the owner before no peer is heard.
_MOST_BACKLOG = 64
#: Seconds until the next try, while the owner takes nothing in.
_PAUSE = 0.005


class Server:
    """Serves peers from an arena.

    Parameters
    ----------
    hub : Hub
    carrier : ServerCarrier
    owner : socket
        The serving process's end of the link.
    view : callable
        ``view(slot)``: memory of one slot.
    fingerprint : bytes
        Of the namespace, for the frames.
    regions : mapping
        Name of a transport -> the arena, for clients that read it by that.
    """

    def __init__(
        self,
        hub: Hub,
        carrier: ServerCarrier,
        owner: socket.socket,
        view: Callable[[int], memoryview],
        fingerprint: bytes,
        regions: Mapping[str, Region],
    ) -> None:
        self._hub = hub
        self._carrier = carrier
        self._owner = owner
        self._view = view
        self._fingerprint = fingerprint
        self._regions = regions
        self._digests: dict[int, tuple[int, bytes]] = {}  # slot -> generation, and digest of what it holds
        self._backlog: deque[FromServer] = deque()
        self._headers = memoryview(bytearray(MOST_OFFERS * _HEADER))
        self._message = memoryview(bytearray(LINK_LIMIT))
        self._next_beat = 0.0
        self._chunks = self._bytes = self._dropped = 0
        self._poller = zmq.Poller()
        self._poller.register(owner, zmq.POLLIN)
        carrier.register(self._poller)
        owner.setblocking(False)

    def run(self) -> None:
        """Serve until the owner closes the link."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """One round; False when the owner has closed the link."""
        self._poller.poll(round(self._pause() * 1000 + 0.499))
        now = time.monotonic()
        if not self._hear_owner(now):
            return False
        if len(self._backlog) < _MOST_BACKLOG:
            self._hear_peers(now)
        if now >= self._hub.next_deadline:
            self._hub.expire(now)
        self._send_some()
        self._tell_peers()
        self._beat(now)
        self._tell_owner()
        return True

    def _pause(self) -> float:
        if self._hub.busy:
            return 0.0
        if self._backlog:
            return _PAUSE
        now = time.monotonic()
        return max(0.0, min(self._hub.next_deadline, self._next_beat) - now)

    def _hear_owner(self, now: float) -> bool:
        while True:
            try:
                size = self._owner.recv_into(self._message)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not size:
                return False
            self._hub.answered(decode_from_owner(self._message[:size]), now)

    def _hear_peers(self, now: float) -> None:
        for _ in range(_ROUND):
            delivery = self._carrier.receive()
            if delivery is None:
                return
            self._hub.received(delivery.peer, delivery.control, now)

    def _send_some(self) -> None:
        """Send chunks, up to the first one that takes time; those that are only offered go together."""
        together: list[Parcel] = []
        for _ in range(_ROUND):
            parcel = self._hub.next_parcel()
            if parcel is None:
                break
            is_offered = parcel.session.transport in self._regions
            if together and not (is_offered and _belongs(parcel, together)):
                self._offer(together)
                together = []
            if not is_offered:
                self._send(parcel)
                break
            together.append(parcel)
            if self._digests.get(parcel.slot, (-1,))[0] != parcel.generation:
                break
        if together:
            self._offer(together)

    def _send(self, parcel: Parcel) -> None:
        payload = self._build(parcel, 0)
        session = parcel.session
        message = encode(Chunk(session.number, parcel.id, parcel.place, parcel.size))
        self._count([parcel], self._carrier.send(session.peer, message, self._headers[:_HEADER], payload))

    def _offer(self, parcels: list[Parcel]) -> None:
        """Say where the chunks are, all of one request."""
        session = parcels[0].session
        region = self._regions[session.transport]
        for number, parcel in enumerate(parcels):
            self._build(parcel, number)
        chunks = [(parcel.place, parcel.size, region.offer(parcel)) for parcel in parcels]
        message = encode(Offer(session.number, parcels[0].id, chunks))
        headers = self._headers[: _HEADER * len(parcels)]
        self._count(parcels, self._carrier.send(session.peer, message, headers))

    def _build(self, parcel: Parcel, number: int) -> memoryview:
        """Fill the header of that number; returns the payload."""
        payload = self._view(parcel.slot)[: parcel.size]
        header = self._headers[_HEADER * number :][:_HEADER]
        digest = self._digest(parcel, payload)
        frame.build(header, payload, key=parcel.key, fingerprint=self._fingerprint, digest=digest)
        return payload

    def _count(self, parcels: list[Parcel], sent: bool) -> None:
        if sent:
            self._chunks += len(parcels)
            self._bytes += sum([parcel.size for parcel in parcels])
        else:
            self._hub.unreachable(parcels[0].session.peer)

    def _digest(self, parcel: Parcel, payload: memoryview) -> bytes:
        """Of the payload; computed once, however many peers read it."""
        generation, digest = self._digests.get(parcel.slot, (-1, b""))
        if generation != parcel.generation:
            digest = frame.digest_of(payload)
            self._digests[parcel.slot] = (parcel.generation, digest)
        return digest

    def _tell_peers(self) -> None:
        queue = self._hub.to_peers
        while queue:
            peer, message = queue.popleft()
            if not self._carrier.send(peer, encode(message)):
                self._hub.unreachable(peer)

    def _tell_owner(self) -> None:
        self._backlog.extend(_with_one_release(self._hub.to_owner))
        self._hub.to_owner.clear()
        try:
            while self._backlog:
                self._owner.send(encode_link(self._backlog[0]))
                self._backlog.popleft()
        except BlockingIOError:
            pass
        except ConnectionError:  # the next round finds the link closed
            self._backlog.clear()

    def _beat(self, now: float) -> None:
        if now < self._next_beat or self._backlog:
            return
        self._next_beat = now + BEAT
        counters = Counter(self._hub.counters)
        self._hub.counters.clear()
        counters.update(
            chunks=self._chunks, bytes=self._bytes, malformed=self._carrier.dropped - self._dropped
        )
        self._chunks = self._bytes = 0
        self._dropped = self._carrier.dropped
        self._hub.to_owner.append(Beat(dict(+counters)))


def _with_one_release(messages: deque[FromServer]) -> list[FromServer]:
    """`messages` with all releases in one, at the front: what comes free may serve what is asked for."""
    slots = [slot for message in messages if isinstance(message, Release) for slot in message.slots]
    others: list[FromServer] = [message for message in messages if not isinstance(message, Release)]
    return [Release(slots), *others] if slots else others


def _belongs(parcel: Parcel, others: list[Parcel]) -> bool:
    """Whether the chunk can be offered together with `others`."""
    return len(others) < MOST_OFFERS and parcel.session is others[0].session and parcel.id == others[0].id
