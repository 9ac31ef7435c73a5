"""The server's side of all sessions, without I/O: messages in, messages and orders to send out.

A request goes through these states, each index of it on its own::

    todo -> asked -> held -> (acknowledged, cancelled or overdue: released)
              |
              +-> missing, also when it was waited for in vain

``todo``: not asked of the owner yet, because the peer has as many leases as it may. ``asked``: the owner has
been asked; the answer is a slot, nothing, or that the key is being filled. ``held``: leased; the chunk is, or
will be, on its way. Whatever the owner lends for somebody who is gone is released at once.

Bounds: sessions, leases and waiting keys of each peer, and the rate at which it names keys. A message that
does not fit the state of its session is dropped and counted; nothing that a peer sends can raise.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from .admission import ServerIdentity
from .books import Fetching, Parcel, Session, Ticket
from .limits import Bucket, Limits
from .link import COMING_SLOT, MISSING_SLOT, Ask, Forget, FromOwner, FromServer, Lent, Located, Release
from .protocol import (
    NONCE_BYTES,
    VERSION,
    Ack,
    Cancel,
    Challenge,
    Failed,
    Fetch,
    Found,
    Goodbye,
    Hello,
    Lookup,
    Message,
    Missing,
    Proof,
    Reason,
    Refused,
    Request,
    Welcome,
    decode_request,
    prove,
)

__all__ = ["Hub"]

#: Seconds after which a lookup that the owner has not answered is forgotten.
_LOOKUP_PATIENCE = 30.0


class Hub:
    """Sessions of a server.

    Parameters
    ----------
    identity : ServerIdentity
    limits : Limits
    draw : callable
        Source of nonces: so many random bytes.

    Attributes
    ----------
    to_peers : deque of (peer, message)
    to_owner : deque of message
    counters : Counter
        What was dropped, refused or overdue, since the last look.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        limits: Limits | None = None,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.to_peers: deque[tuple[bytes, Message]] = deque()
        self.to_owner: deque[FromServer] = deque()
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._limits = limits or Limits()
        self._draw = draw
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # the most recently heard last
        self._tickets: dict[int, Ticket] = {}
        self._last_ticket = 0
        self._parcels: deque[Parcel] = deque()

    # What comes in.

    def received(self, peer: bytes, data: bytes, now: float) -> None:
        """A peer has sent `data`."""
        message = decode_request(data)
        if message is None:
            self.counters["malformed"] += 1
            return
        if isinstance(message, Hello):
            self._greet(peer, message, now)
            return
        session = self._sessions.get(peer)
        if session is None or session.number != message.session:
            if not isinstance(message, Goodbye):
                self._refuse(peer, message.session, "no-session", "say hello first")
            return
        self._sessions.move_to_end(peer)
        self._hear(session, message, now)

    def answered(self, message: FromOwner, now: float) -> None:
        """The owner has answered."""
        if isinstance(message, Located):
            self._located(message)
        else:
            self._lent(message)

    def unreachable(self, peer: bytes) -> None:
        """There is no connection to `peer` any more."""
        session = self._sessions.get(peer)
        if session is not None:
            self.counters["unreachable"] += 1
            self._end(session)

    def expire(self, now: float) -> None:
        """Give up what is overdue."""
        for session in list(self._sessions.values()):
            for number, fetch in list(session.fetches.items()):
                if now >= fetch.deadline:
                    self.counters["overdue"] += 1
                    self._withdraw(session, number)
                elif now >= fetch.wait_until and fetch.coming:
                    self._give_up_waiting(session, number, fetch)
            self._ask(session, now)
        for number, ticket in list(self._tickets.items()):
            if not ticket.indexes and now >= ticket.deadline:
                del self._tickets[number]

    # What goes out.

    def next_parcel(self) -> Parcel | None:
        """The next chunk to be sent, of those that are still wanted."""
        while self._parcels:
            parcel = self._parcels.popleft()
            if self.is_wanted(parcel):
                return parcel
        return None

    @property
    def busy(self) -> bool:
        """Whether chunks wait to be sent."""
        return bool(self._parcels)

    @property
    def next_deadline(self) -> float:
        """Nothing is overdue before this time."""
        times = [
            min(f.deadline, f.wait_until if f.coming else f.deadline)
            for session in self._sessions.values()
            for f in session.fetches.values()
        ]
        times += [ticket.deadline for ticket in self._tickets.values()]
        return min(times, default=float("inf"))

    @property
    def leases(self) -> int:
        """Slots held for peers, or asked for."""
        return sum(session.leases for session in self._sessions.values())

    # Hello.

    def _greet(self, peer: bytes, hello: Hello, now: float) -> None:
        before = self._sessions.get(peer)
        if before is not None and before.number == hello.session:
            self.counters["replayed"] += 1
            return
        if before is not None:
            self._end(before)
        skew = self._identity.skew(hello)
        if skew:
            self._refuse(peer, hello.session, "version", skew)
            return
        if not self._make_room(peer, hello):
            return
        session = Session(peer, hello, Bucket(self._limits.rate))
        self._sessions[peer] = session
        if self._identity.token:
            session.nonce = self._draw(NONCE_BYTES)
            self._say(session, Challenge(hello.session, session.nonce))
        else:
            self._admit(session, b"")

    def _make_room(self, peer: bytes, hello: Hello) -> bool:
        if len(self._sessions) < self._limits.peers:
            return True
        idle = next((session for session in self._sessions.values() if not session.leases), None)
        if idle is None:
            self._refuse(peer, hello.session, "full", f"{len(self._sessions)} peers are being served")
            return False
        self._end(idle)
        return True

    def _check_proof(self, session: Session, proof: Proof) -> None:
        token = self._identity.token
        if session.open or not session.nonce:
            self.counters["unexpected"] += 1
            return
        expected = prove(token, "client", session.hello, session.nonce)
        if hmac.compare_digest(expected, proof.mac):
            self._admit(session, prove(token, "server", session.hello, session.nonce))
            return
        self._end(session)
        self._refuse(session.peer, session.number, "authentication", "the token is not the server's")

    def _admit(self, session: Session, mac: bytes) -> None:
        """The client has proved what it must; is it about the same bytes?"""
        objection = self._identity.objection(session.hello)
        if objection:
            self._end(session)
            self._refuse(session.peer, session.number, *objection)
            return
        transport = self._identity.choose(session.hello)
        session.open, session.transport = True, transport
        self._say(session, Welcome(session.number, VERSION, mac, transport, self._identity.offers[transport]))

    # Requests.

    def _hear(self, session: Session, message: Request, now: float) -> None:
        if isinstance(message, Goodbye):
            self._end(session)
        elif isinstance(message, Proof):
            self._check_proof(session, message)
        elif not session.open:
            self.counters["unexpected"] += 1
        elif isinstance(message, Ack):
            self._acknowledge(session, message, now)
        elif isinstance(message, Cancel):
            self._withdraw(session, message.id)
            self._ask(session, now)
        elif isinstance(message, Lookup | Fetch):
            self._take_on(session, message, now)

    def _take_on(self, session: Session, request: Lookup | Fetch, now: float) -> None:
        if request.id <= session.highest:
            self.counters["replayed"] += 1
            return
        session.highest = request.id
        count = len(request.keys)
        if not session.bucket.take(count, now):
            self._fail(session, request.id, "too many keys in too little time")
        elif isinstance(request, Lookup):
            self._put(session, request.id, request.keys, [], now + _LOOKUP_PATIENCE)
        elif session.waiting + count > self._limits.keys:
            self._fail(session, request.id, "too many keys are waiting")
        else:
            patience = min(request.patience / 1000, self._limits.hold)
            session.fetches[request.id] = Fetching(
                keys=request.keys,
                wait_until=now + min(request.wait / 1000, patience),
                deadline=now + patience,
                todo=deque(range(count)),
            )
            self._ask(session, now)

    def _ask(self, session: Session, now: float) -> None:
        """Ask the owner for as much as the peer may have."""
        room = self._limits.leases - session.leases
        for number, fetch in session.fetches.items():
            if room <= 0:
                return
            indexes = [fetch.todo.popleft() for _ in range(min(room, len(fetch.todo)))]
            if indexes:
                room -= len(indexes)
                keys = [fetch.keys[index] for index in indexes]
                ticket = self._put(session, number, keys, indexes, fetch.deadline)
                fetch.asked.update(dict.fromkeys(indexes, ticket))

    def _put(
        self, session: Session, number: int, keys: list[bytes], indexes: list[int], deadline: float
    ) -> int:
        """Ask the owner; `indexes` are those of the keys in a fetch."""
        self._last_ticket += 1
        self._tickets[self._last_ticket] = Ticket(session, number, indexes, deadline)
        self.to_owner.append(Ask(self._last_ticket, keys, bool(indexes)))
        return self._last_ticket

    def _acknowledge(self, session: Session, ack: Ack, now: float) -> None:
        fetch = session.fetches.get(ack.id)
        slots = [fetch.held.pop(index) for index in ack.indexes if index in fetch.held] if fetch else []
        if not slots:
            self.counters["stale"] += 1
            return
        self._release(slots)
        self._settle(session, ack.id)
        self._ask(session, now)

    # The owner's answers.

    def _located(self, answer: Located) -> None:
        ticket = self._tickets.pop(answer.ticket, None)
        if ticket is not None and self._lives(ticket.session):
            self._say(ticket.session, Found(ticket.session.number, ticket.id, answer.states))

    def _lent(self, answer: Lent) -> None:
        ticket = self._tickets.get(answer.ticket)
        fetch = ticket.session.fetches.get(ticket.id) if ticket and self._lives(ticket.session) else None
        missing, spare = [], []
        for place, slot, size, version in answer.rows:
            index = ticket.indexes[place] if ticket else -1
            wanted = fetch is not None and fetch.asked.get(index) == answer.ticket
            if not wanted or fetch is None or ticket is None:
                spare += [slot] if slot >= 0 else []
                continue
            if slot == COMING_SLOT:
                fetch.coming.add(index)
                continue
            del fetch.asked[index]
            fetch.coming.discard(index)
            if slot == MISSING_SLOT:
                missing.append(index)
                continue
            fetch.held[index] = slot
            key = fetch.keys[index]
            self._parcels.append(Parcel(ticket.session, ticket.id, index, key, slot, size, version))
        self._release(spare)
        if ticket is not None and fetch is not None:
            self._say_missing(ticket.session, ticket.id, missing)
            if answer.ticket not in fetch.asked.values():
                self._tickets.pop(answer.ticket, None)

    # How things end.

    def _give_up_waiting(self, session: Session, number: int, fetch: Fetching) -> None:
        missing = sorted(fetch.coming)
        self._forget(fetch, missing)
        self._say_missing(session, number, missing)

    def _withdraw(self, session: Session, number: int) -> None:
        """Nobody wants the fetch any more."""
        fetch = session.fetches.pop(number, None)
        if fetch is None:
            self.counters["stale"] += 1
            return
        self._forget(fetch, list(fetch.asked))
        self._release(fetch.held.values())

    def _end(self, session: Session) -> None:
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
        for number in list(session.fetches):
            self._withdraw(session, number)

    def _forget(self, fetch: Fetching, indexes: list[int]) -> None:
        """Stop waiting for what was asked of the owner; the first answer to a ticket is about all of its
        keys, so that those which are still being filled go together."""
        tickets = dict.fromkeys(fetch.asked.pop(index) for index in indexes)
        fetch.coming.difference_update(indexes)
        for ticket in tickets:
            self._tickets.pop(ticket, None)
            self.to_owner.append(Forget(ticket))

    def _release(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        if slots:
            self.to_owner.append(Release(slots))

    def _settle(self, session: Session, number: int) -> None:
        if session.fetches[number].over:
            del session.fetches[number]

    def _lives(self, session: Session) -> bool:
        return self._sessions.get(session.peer) is session

    def is_wanted(self, parcel: Parcel) -> bool:
        """Whether the chunk is held for whom it is to be sent to; any thread may ask."""
        fetch = parcel.session.fetches.get(parcel.id) if self._lives(parcel.session) else None
        return fetch is not None and fetch.held.get(parcel.place) == parcel.slot

    # Words.

    def _say(self, session: Session, message: Message) -> None:
        self.to_peers.append((session.peer, message))

    def _say_missing(self, session: Session, number: int, indexes: list[int]) -> None:
        if indexes:
            self._say(session, Missing(session.number, number, indexes))
        self._settle(session, number)

    def _fail(self, session: Session, number: int, detail: str) -> None:
        self.counters["failed"] += 1
        self._say(session, Failed(session.number, number, detail))

    def _refuse(self, peer: bytes, session: int, reason: Reason, detail: str) -> None:
        self.counters["refused"] += 1
        self.to_peers.append((peer, Refused(session, reason, detail)))
