"""Reads from one peer: a thread that owns the connection, for any number of threads that wait.

Who owns what: the thread of :class:`PeerClient` alone touches carrier and session, and writes into the
buffers of calls. A caller hands in a call and waits until the thread has ended it; after that the thread
never touches the call's buffers again, so that a byte which comes late lands nowhere. What is read one-sided
may write until it has ended, whatever the deadline: such a call is answered when it has, and never where its
end cannot be told. If that takes too long the engine answers in its place, and keeps the slot from use until
the worker has answered or is gone.

A call fails at once while there is no connection: whether to wait for a peer is up to the tier's breaker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import zmq

from ..doorbell import Doorbell
from ..errors import BackendError, KVStoreError
from .calls import Arrived, Call, failure, refusal
from .protocol import COMING, HERE, MOST_KEYS, encode
from .session import (
    Absent,
    Arriving,
    ClientIdentity,
    ClientSession,
    Event,
    Located,
    Lost,
    Offered,
    Opened,
    Rejected,
    State,
)
from .transport import ZMQ, ClientCarrier, Reader, Tag

__all__ = ["PeerClient"]

_log = logging.getLogger("kvstore")

#: Seconds between two tries to greet a peer that is not connected.
_PAUSE = 0.01
#: Seconds between two looks at reads that are under way; nothing tells when one has ended.
_LOOK_EVERY = 50e-6
#: Sessions in a row that a reader which has worked may end before it is given up.
_CREDIT = 3
_NOWHERE = memoryview(bytearray(1))


class PeerClient:
    """One connection to one peer.

    Parameters
    ----------
    name : str
        Of the peer, for messages.
    identity : ClientIdentity
    make_carrier : callable
        Connects; called by the thread that uses the carrier.
    timeout : float
        Seconds that a call may take.
    readers : sequence of Reader
        For the transports of `identity` that need one; used by the thread until :meth:`close`.

    Attributes
    ----------
    counters : Counter
    given_up : set of str
        Transports that do not work with this peer.
    """

    def __init__(
        self,
        name: str,
        identity: ClientIdentity,
        make_carrier: Callable[[], ClientCarrier],
        timeout: float,
        readers: Sequence[Reader] = (),
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.given_up: set[str] = set()
        self._name = name
        self._session = ClientSession(identity)
        self._make_carrier = make_carrier
        self._timeout = timeout
        self._readers = {reader.name: reader for reader in readers}
        self._reader: Reader | None = None  # of the session
        self._credits: Counter[str] = Counter()  # sessions that each may still end; none before it has worked
        self._calls: deque[Call] = deque()  # handed in
        self._waiting: deque[Call] = deque()  # for the session to open
        self._lookups: dict[int, Call] = {}
        self._fetches: dict[Tag, Call] = {}
        self._reads: dict[Tag, Call] = {}  # fetches whose payload is being read
        self._acks: dict[int, list[int]] = {}
        self._closing = False
        self._bell = Doorbell()
        self._thread = threading.Thread(target=self._run, name="kvstore-peer", daemon=True)

    # For any thread.

    @property
    def is_alive(self) -> bool:
        """Whether there is a thread that answers; it ends by :meth:`close`, or by an error of its own."""
        return self._thread.is_alive() and not self._closing

    def open(self, patience: float | None = None) -> None:
        """Connect and open a session; wait for that so many seconds at most.

        Raises
        ------
        NamespaceMismatchError, ConfigError
            The peer refuses: it serves another namespace, speaks another version, or asks for another token.
        BackendError
            It does not answer in time.
        """
        self._thread.start()
        self._wait(Call(time.monotonic() + min(self._timeout, patience or self._timeout)))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each of `keys` is there, or is being filled; one round trip for each thousand."""
        parts = [list(keys[first : first + MOST_KEYS]) for first in range(0, len(keys), MOST_KEYS)]
        deadline = time.monotonic() + self._timeout
        calls = [Call(deadline, part) for part in parts]
        for call in calls:
            self._hand_in(call)
        return [state in (HERE, COMING) for call in calls for state in call.wait().states]

    def fetch(self, key: bytes, header: memoryview, payload: memoryview) -> Arrived | None:
        """Bring a frame into the two buffers; None when the peer does not have it."""
        return self._wait(Call(time.monotonic() + self._timeout, [key], (header, payload))).arrived

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        self._closing = True
        self._bell.ring()
        if self._thread.ident is not None:
            self._thread.join()

    def _wait(self, call: Call) -> Call:
        self._hand_in(call)
        return call.wait()

    def _hand_in(self, call: Call) -> None:
        self._calls.append(call)
        self._bell.ring()
        if self._closing or not self._thread.is_alive():
            call.fail(self._error("the connection is closed"))

    # The thread.

    def _run(self) -> None:
        why = "the connection is closed"
        try:
            carrier = self._make_carrier()
            try:
                poller = zmq.Poller()
                poller.register(self._bell.fd, zmq.POLLIN)
                carrier.register(poller)
                for reader in self._readers.values():
                    reader.attach(poller)
                while not self._closing:
                    if not poller.poll(round(self._pause() * 1000 + 0.499)) and self._must_look:
                        time.sleep(_LOOK_EVERY)
                    self._turn(carrier)
                self._session.goodbye()
                self._send(carrier)
            finally:
                carrier.close()
                self._end_reads(self._error("the connection is closed"))
        except Exception as error:  # whatever it was: nobody is left waiting
            why = f"{type(error).__name__}: {error}"
        finally:
            self._closing = True
            self._fail_all(self._error(why))

    def _pause(self) -> float:
        if self._must_look:
            return 0.0
        if self._waiting and self._session.state is State.CLOSED:
            return _PAUSE
        ends = [self._session.next_deadline, *(call.deadline for call in self._reads.values())]
        return min(max(0.0, min(ends) - time.monotonic()), 3600.0)

    @property
    def _must_look(self) -> bool:
        return bool(self._reads) and self._reader is not None and not self._reader.wakes

    def _turn(self, carrier: ClientCarrier) -> None:
        self._bell.answer()
        now = time.monotonic()
        self._take_calls(now)
        self._send(carrier)
        while (control := carrier.receive()) is not None:
            event = self._session.received(control)
            if event is not None:
                self._happened(event, carrier)
            self._finish_reads()
        self._finish_reads()
        self._drop_overdue(time.monotonic())
        for event in self._session.expire(time.monotonic()):
            self._happened(event, carrier)
        self._acknowledge()
        self._send(carrier)
        if self._session.counters:
            self.counters.update(self._session.counters)
            self._session.counters.clear()

    def _take_calls(self, now: float) -> None:
        """Begin what has been handed in."""
        while self._calls:
            self._waiting.append(self._calls.popleft())
        if not self._waiting:
            return
        if self._session.state is State.CLOSED:
            if self._reads:  # the reader cannot leave their server before they end
                self._not_connected("what was being read has not ended")
                return
            self._session.greet(max(call.deadline for call in self._waiting))
        if self._session.state is State.OPEN:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Ask for everything that waits: chunks together, as many as a message names."""
        chunks = []
        while self._waiting:
            call = self._waiting.popleft()
            if call.buffers is not None:
                chunks.append(call)
            elif call.keys:
                self._lookups[self._session.lookup(call.keys, call.deadline)] = call
            else:
                call.done.set()
        for first in range(0, len(chunks), MOST_KEYS):
            part = chunks[first : first + MOST_KEYS]
            deadline = min(call.deadline for call in part)
            wait = max(0.0, deadline - now) / 2  # a miss in good time is better than a failure
            number = self._session.fetch([call.keys[0] for call in part], wait, deadline, now)
            self._fetches.update({(number, place): call for place, call in enumerate(part)})

    def _happened(self, event: Event, carrier: ClientCarrier) -> None:
        if isinstance(event, Opened):
            self._opened(event)
        elif isinstance(event, Rejected):
            self._fail_all(refusal(self._name, event.reason, event.detail))
        elif isinstance(event, Located):
            call = self._lookups.pop(event.id)
            call.states = event.states
            call.done.set()
        elif isinstance(event, Arriving):
            call = self._fetches.pop((event.id, event.place))
            assert call.buffers is not None
            call.arrived = Arrived(carrier.take(*call.buffers))
            self.counters[ZMQ] += 1
            self._arrived((event.id, event.place), call)
        elif isinstance(event, Offered):
            self._read(event, carrier)
        elif isinstance(event, Absent):
            for place in event.indexes:
                self._fetches.pop((event.id, place)).done.set()
        elif isinstance(event, Lost):
            self._lost(event)

    def _opened(self, event: Opened) -> None:
        self._reader = self._readers.get(event.transport)
        try:
            if self._reader is not None:
                self._reader.connect(event.metadata)
        except OSError as error:
            self._reader_failed(str(error))
        else:
            self._begin(time.monotonic())

    def _read(self, event: Offered, carrier: ClientCarrier) -> None:
        """Read what is offered, if it fits; if not it is no frame of ours, which its size will tell."""
        tag = (event.id, event.place)
        call = self._fetches.pop(tag)
        assert call.buffers is not None
        assert self._reader is not None
        header, payload = call.buffers
        call.arrived = Arrived(carrier.take(header, _NOWHERE) + event.size)
        if 0 < event.size <= payload.nbytes:
            self._reads[tag] = call
            self._reader.start(tag, event.address, payload[: event.size])
        else:
            self._arrived(tag, call)

    def _finish_reads(self) -> None:
        if self._reader is None:
            return
        for read in self._reader.finished():
            call = self._reads.pop(read.tag, None)
            if call is None:  # it went with one that has failed before it
                continue
            if read.error:
                self._reader_failed(read.error)
                if read.over:
                    call.fail(self._error(read.error))  # after that, for the caller may ask again at once
                continue
            assert call.arrived is not None
            call.arrived = Arrived(call.arrived.size, read.digest)
            self._credits[self._reader.name] = _CREDIT
            self.counters[self._reader.name] += 1
            self._arrived(read.tag, call)

    def _drop_overdue(self, now: float) -> None:
        """As :meth:`_drop_reads`. A reader that cannot, and has never worked, is given up: the way to the
        server's memory may lead through a filter that says nothing."""
        error = self._error("it did not send in time", retryable=False)
        self._drop_reads(now, error)
        late = any(now >= call.deadline for call in self._reads.values())
        if late and self._reader is not None and self._credits[self._reader.name] <= 0:
            self._reader_failed("it did not send in time")
            self._end_reads(error)

    def _drop_reads(self, now: float, error: KVStoreError) -> None:
        """Fail what is overdue, where nothing can be written for it any more."""
        for tag, call in list(self._reads.items()):
            if now >= call.deadline and self._reader is not None and self._reader.drop(tag):
                del self._reads[tag]
                call.fail(error)

    def _reader_failed(self, why: str) -> None:
        """Begin anew; what has never worked, or works no more, is given up if there is another way."""
        assert self._reader is not None
        name = self._reader.name
        if self._session.state is State.OPEN:  # one failure for all that it was reading
            self._credits[name] -= 1
        hopeless = self._credits[name] <= 0
        if hopeless and name not in self.given_up and self._session.give_up(name):
            self.given_up.add(name)
            _log.warning("the peer %s is read without %s: %s", self._name, name, why)
        self._not_connected(why)
        if hopeless and name not in self.given_up:
            self._fail_all(self._error(why))  # nobody need wait for another session

    def _end_reads(self, error: KVStoreError) -> None:
        """Let no read go on, and fail those of which none can write any more."""
        adrift = {tag for reader in self._readers.values() for tag in reader.disconnect()}
        for tag, call in self._reads.items():
            if tag not in adrift:
                call.fail(error)
        self._reads.clear()

    def _arrived(self, tag: Tag, call: Call) -> None:
        call.done.set()
        self._acks.setdefault(tag[0], []).append(tag[1])

    def _lost(self, event: Lost) -> None:
        # Who has waited in vain does not wait once more: the tier's deadline would pass meanwhile.
        error = self._error(event.detail, retryable=not event.overdue)
        lookup = self._lookups.pop(event.id, None)
        if lookup is not None:
            lookup.fail(error)
        for number, place in [id_and_place for id_and_place in self._fetches if id_and_place[0] == event.id]:
            self._fetches.pop((number, place)).fail(error)

    def _acknowledge(self) -> None:
        for number, places in self._acks.items():
            self._session.acknowledge(number, places)
        self._acks.clear()

    def _send(self, carrier: ClientCarrier) -> None:
        outbox = self._session.outbox
        while outbox:
            if carrier.send(encode(outbox[0])):
                outbox.popleft()
                continue
            outbox.clear()
            self._not_connected("there is no connection")

    def _not_connected(self, why: str) -> None:
        """The session is over. Whoever opens the client waits for a connection; nobody else does."""
        self._session.disconnected()
        self._drop_reads(float("inf"), self._error(why))
        now = time.monotonic()
        patient = [call for call in self._waiting if not call.keys and call.deadline > now]
        for call in patient:
            self._waiting.remove(call)
        self._fail_all(self._error(why))
        self._waiting.extend(patient)

    def _fail_all(self, error: KVStoreError) -> None:
        for call in (*self._calls, *self._waiting, *self._lookups.values(), *self._fetches.values()):
            call.fail(error)
        for calls in (self._calls, self._waiting, self._lookups, self._fetches, self._acks):
            calls.clear()

    def _error(self, why: str, *, retryable: bool = True) -> BackendError:
        return failure(self._name, why, retryable=retryable)
