"""Reads from one peer: a thread that owns the connection, for any number of threads that wait.

Who owns what: the thread of :class:`PeerClient` alone touches carrier and session, and writes into the
buffers of calls. A caller hands in calls and waits until the thread has ended each; after that the thread
never touches the call's buffers again, so that a byte which comes late lands nowhere. What is read one-sided
may write until it has ended, whatever the deadline: such a call is answered when it has, and never where its
end cannot be told. If that takes too long the engine answers in its place, and keeps the slot from use until
the worker has answered or is gone.

However many chunks are wanted, a few are under way at a time, and more are asked for when half of them are
here. A chunk's time runs from the moment it is asked for.

A call fails at once while there is no connection: whether to wait for a peer is up to the tier's breaker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence

import zmq

from ..doorbell import Doorbell
from ..errors import BackendError, KVStoreError
from .calls import Arrived, Call, failure, refusal
from .protocol import COMING, HERE, MOST_KEYS, encode
from .reads import Reads
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
    window : int
        Chunks under way at a time.
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
        window: int = 16,
        readers: Sequence[Reader] = (),
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.given_up: set[str] = set()
        self._name = name
        self._session = ClientSession(identity)
        self._make_carrier = make_carrier
        self._timeout = timeout
        self._window = min(window, MOST_KEYS)
        self._calls: deque[Call] = deque()  # handed in
        self._waiting: deque[Call] = deque()  # for the session to open
        self._lookups: dict[int, Call] = {}
        self._wanted: deque[Call] = deque()  # chunks that have not been asked for
        self._fetches: dict[Tag, Call] = {}
        self._reads = Reads(readers)  # fetches whose payload is being read
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
        self._hand_in([call := Call(time.monotonic() + min(self._timeout, patience or self._timeout))])
        call.wait()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each of `keys` is there, or is being filled; one round trip for each thousand."""
        deadline = time.monotonic() + self._timeout
        firsts = range(0, len(keys), MOST_KEYS)
        calls = [Call(deadline, list(keys[first : first + MOST_KEYS])) for first in firsts]
        self._hand_in(calls)
        return [state in (HERE, COMING) for call in calls for state in call.wait().states]

    def fetch(self, wanted: Iterable[tuple[bytes, memoryview, memoryview]]) -> Generator[Call]:
        """Bring the frame of each key into a buffer for the header and one for the payload, from now on; the
        calls, in order, each when it has ended. Also an early end waits for all."""
        deadline = time.monotonic() + self._timeout
        calls = [Call(deadline, [key], (header, payload)) for key, header, payload in wanted]
        self._hand_in(calls)
        ended = self._ended(calls)
        next(ended)
        return ended

    @staticmethod
    def _ended(calls: Sequence[Call]) -> Generator[Call]:
        try:
            yield Call(0.0)  # begun: whoever ends it now, even unused, waits for the others
            for call in calls:
                call.done.wait()
                yield call
        finally:
            for call in calls:
                call.done.wait()

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        self._closing = True
        self._bell.ring()
        if self._thread.ident is not None:
            self._thread.join()

    def _hand_in(self, calls: Sequence[Call]) -> None:
        self._calls.extend(calls)
        self._bell.ring()
        if self._closing or not self._thread.is_alive():
            for call in calls:
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
                self._reads.attach(poller)
                while not self._closing:
                    poller.poll(round(self._pause() * 1000 + 0.499))
                    self._turn(carrier)
                self._session.goodbye()
                self._send(carrier)
            finally:
                carrier.close()
                self._reads.end(self._error("the connection is closed"))
        except Exception as error:  # whatever it was: nobody is left waiting
            why = f"{type(error).__name__}: {error}"
        finally:
            self._closing = True
            self._fail_all(self._error(why))

    def _pause(self) -> float:
        if self._waiting and self._session.state is State.CLOSED:
            return _PAUSE
        end = min(self._session.next_deadline, self._reads.next_deadline)
        return min(max(0.0, end - time.monotonic()), 3600.0)

    def _turn(self, carrier: ClientCarrier) -> None:
        self._bell.answer()
        if carrier.has_lost_connection() and self._session.state is not State.CLOSED:
            self._not_connected("the connection has broken")
        now = time.monotonic()
        self._take_calls(now)
        self._send(carrier)
        while (control := carrier.receive()) is not None:
            event = self._session.received(control)
            if event is not None:
                self._happened(event, carrier)
        self._finish_reads()
        self._ask(time.monotonic())
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
        """Take on everything that waits for the session."""
        while self._waiting:
            call = self._waiting.popleft()
            if call.buffers is not None:
                self._wanted.append(call)
            elif call.keys:
                self._lookups[self._session.lookup(call.keys, call.deadline)] = call
            else:
                call.done.set()
        self._ask(now)

    def _ask(self, now: float) -> None:
        """Ask for chunks if a good part of what may be under way is not."""
        room = self._window - len(self._fetches) - len(self._reads)
        if not self._wanted or room < min(len(self._wanted), -(-self._window // 2)):
            return
        part = [self._wanted.popleft() for _ in range(min(room, len(self._wanted)))]
        deadline = now + self._timeout
        for call in part:
            call.deadline = deadline
        wait = self._timeout / 2  # a miss in good time is better than a failure
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
        try:
            self._reads.turn_to(event.transport, event.metadata)
        except OSError as error:
            self._reader_failed(str(error))
        else:
            self._begin(time.monotonic())

    def _read(self, event: Offered, carrier: ClientCarrier) -> None:
        calls = [self._fetches.pop((event.id, place)) for _, place, _, _ in event.chunks]
        for tag, call in self._reads.take(event, carrier, calls):
            self._arrived(tag, call)

    def _finish_reads(self) -> None:
        came = []
        try:
            for read, call in self._reads.ended():
                if not read.error:
                    self.counters[self._reads.way] += 1
                    self._acks.setdefault(read.tag[0], []).append(read.tag[1])
                    came.append(call)
                    continue
                self._reader_failed(read.error)
                if read.over:  # after that, for the caller may ask again at once
                    call.fail(self._error(read.error))
        finally:
            for call in reversed(came):  # who waits for the first one wakes when all are there
                call.done.set()

    def _drop_overdue(self, now: float) -> None:
        """Fail what is overdue, and with it what it has kept from being asked for."""
        if now < self._reads.next_deadline:
            return
        error = self._error("it did not send in time", retryable=False)
        if self._reads.drop_overdue(now, error):
            self._give_up_wanted(error)
        if self._reads.is_stuck(now):
            self._reader_failed("it did not send in time")
            self._reads.end(error)

    def _reader_failed(self, why: str) -> None:
        """Begin anew; what is beyond hope is given up if there is another way."""
        name = self._reads.way
        hopeless = self._reads.blame(once=self._session.state is State.OPEN)
        if hopeless and name not in self.given_up and self._session.give_up(name):
            self.given_up.add(name)
            _log.warning("the peer %s is read without %s: %s", self._name, name, why)
        self._not_connected(why)
        if hopeless and name not in self.given_up:
            self._fail_all(self._error(why))  # nobody need wait for another session

    def _arrived(self, tag: Tag, call: Call) -> None:
        self._acks.setdefault(tag[0], []).append(tag[1])
        call.done.set()

    def _lost(self, event: Lost) -> None:
        # Who has waited in vain does not wait once more: the tier's deadline would pass meanwhile.
        error = self._error(event.detail, retryable=not event.overdue)
        lookup = self._lookups.pop(event.id, None)
        if lookup is not None:
            lookup.fail(error)
        for number, place in [id_and_place for id_and_place in self._fetches if id_and_place[0] == event.id]:
            self._fetches.pop((number, place)).fail(error)
        if event.overdue and lookup is None:
            self._give_up_wanted(error)

    def _give_up_wanted(self, error: KVStoreError) -> None:
        """Who does not answer in time is not asked for the rest: that would take as long again."""
        while self._wanted:
            self._wanted.popleft().fail(error)

    def _acknowledge(self) -> None:
        """Let go of what has come; while more is on its way, of a good part of it at once."""
        if self._reads and sum(map(len, self._acks.values())) < self._window // 2:
            return
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
        self._reads.drop_overdue(float("inf"), self._error(why))
        now = time.monotonic()
        patient = [call for call in self._waiting if not call.keys and call.deadline > now]
        for call in patient:
            self._waiting.remove(call)
        self._fail_all(self._error(why))
        self._waiting.extend(patient)

    def _fail_all(self, error: KVStoreError) -> None:
        asked = (*self._lookups.values(), *self._fetches.values())
        for call in (*self._calls, *self._waiting, *self._wanted, *asked):
            call.fail(error)
        for calls in (self._calls, self._waiting, self._wanted, self._lookups, self._fetches, self._acks):
            calls.clear()

    def _error(self, why: str, *, retryable: bool = True) -> BackendError:
        return failure(self._name, why, retryable=retryable)
