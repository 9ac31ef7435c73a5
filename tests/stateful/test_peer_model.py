"""Sessions of peers over a network that loses, repeats, reorders and delays messages.

The real hub, the real client's session and the owner's real books over a real catalog; only what carries the
messages is a list, from which Hypothesis picks. The link between hub and owner is reliable, as a pair of
sockets is. At every moment:

- a chunk is sent or offered only from a slot that holds it, leased, and one that is offered stays there until
  it is acknowledged or the server has given the request up;
- a client is told of a chunk only if it asked for it, under the key it asked for, and at most once;
- nobody has more leases than he may, and the catalog agrees with the books;

and at the end, when all deadlines are past, nothing is leased, waited for or remembered.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import groupby
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.catalog import Catalog, SlotState
from kvstore.gate.books import Books
from kvstore.namespace import Namespace
from kvstore.peer.admission import ServerIdentity
from kvstore.peer.books import Parcel
from kvstore.peer.hub import Hub
from kvstore.peer.limits import Limits
from kvstore.peer.link import Ask, Forget, FromOwner, Release, decode_from_owner, decode_from_server
from kvstore.peer.link import encode as encode_link
from kvstore.peer.protocol import Chunk, Offer, encode
from kvstore.peer.session import (
    Absent,
    Arriving,
    ClientIdentity,
    ClientSession,
    Located,
    Lost,
    Offered,
    Opened,
    Rejected,
    State,
)
from kvstore.peer.transport import NIXL, ZMQ
from kvstore.policy import make_policy

pytestmark = pytest.mark.timeout(900)  # so many examples take a busy machine minutes

SPACE = Namespace({}, 64)
KEYS = [bytes([number]) * 16 for number in range(8)]
PEERS = [b"first", b"second"]
LIMITS = Limits(leases=3, keys=12, hold=5.0)
SLOTS = 5

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
peers = st.sampled_from(PEERS)


class Message(NamedTuple):
    """On its way; `keys` are what the payload beside it holds, or the memory that is offered."""

    to: bytes  # a client, or nobody: the server
    sender: bytes
    data: bytes
    keys: tuple[bytes, ...] = ()


class Client:
    """A session, and what it has been told."""

    def __init__(self, token: bytes, transports: tuple[str, ...], rng: random.Random) -> None:
        identity = ClientIdentity(SPACE.fingerprint, SPACE.chunk_size, SPACE.manifest, token, transports)
        self.session = ClientSession(identity, rng.randbytes)
        self.fetches: dict[int, dict[int, bytes]] = {}
        self.lookups: dict[int, int] = {}

    def hear(self, message: Message) -> None:
        event = self.session.received(message.data)
        if isinstance(event, Arriving):
            self.take(event.id, event.place, *message.keys)
        elif isinstance(event, Offered):
            assert event.headers == len(message.keys)
            for number, place, _, _ in event.chunks:
                self.take(event.id, place, message.keys[number])
        elif event is not None:
            self.note(event)

    def take(self, number: int, place: int, key: bytes) -> None:
        assert self.fetches[number].pop(place) == key, "another chunk than the one asked for"
        self.session.acknowledge(number, [place])

    def note(self, event: object) -> None:
        if isinstance(event, Absent):
            for place in event.indexes:
                del self.fetches[event.id][place]
        elif isinstance(event, Located):
            assert len(event.states) == self.lookups.pop(event.id)
        elif isinstance(event, Lost):
            if event.id in self.fetches:
                self.fetches[event.id].clear()
            else:
                del self.lookups[event.id]
        elif isinstance(event, Rejected):
            assert self.session.state is State.CLOSED
            self.forget()
        else:
            assert isinstance(event, Opened)

    def forget(self) -> None:
        self.fetches.clear()
        self.lookups.clear()


class Peers(RuleBasedStateMachine):
    """Two clients, a server and its owner."""

    @initialize(
        seed=st.integers(0, 9),
        token=st.sampled_from([b"", b"a shared token 12"]),
        transports=st.sampled_from([(ZMQ,), (NIXL, ZMQ)]),
    )
    def begin(self, seed: int, token: bytes, transports: tuple[str, ...]) -> None:
        rng = random.Random(seed)
        self.rng = rng
        self.now = 0.0
        self.identity = ServerIdentity(
            SPACE.fingerprint, SPACE.chunk_size, SPACE.check_manifest, token, dict.fromkeys(transports, b"")
        )
        self.catalog = Catalog(SLOTS, make_policy("lru", SLOTS))
        wishes = [(ZMQ,), (NIXL, ZMQ)]
        self.clients = {peer: Client(token, wish, rng) for peer, wish in zip(PEERS, wishes, strict=True)}
        self.network: list[Message] = []
        self.start_server()
        for key in KEYS[: SLOTS - 1]:
            self.catalog.publish(key, self.catalog.reserve(key), 64)
        self.connect()

    def start_server(self) -> None:
        self.hub = Hub(self.identity, LIMITS, self.rng.randbytes)
        self.books = Books(self.catalog)
        self.to_owner: deque[bytes] = deque()
        self.to_hub: deque[bytes] = deque()

    # What clients want.

    @precondition(lambda self: any(client.session.state is State.CLOSED for client in self.clients.values()))
    @rule()
    def connect(self) -> None:
        """Greet over a network that works for once."""
        for peer in PEERS:
            self.greet(peer, 4.0)
        self.deliver_everything()

    @rule(peer=peers, patience=st.floats(0.1, 4))
    def greet(self, peer: bytes, patience: float) -> None:
        client = self.clients[peer]
        if client.session.state is State.CLOSED:
            client.session.greet(self.now + patience)
        self.post()

    @precondition(lambda self: self.open_peers)
    @rule(data=st.data(), keys=some_keys)
    def lookup(self, data: st.DataObject, keys: list[bytes]) -> None:
        client = self.clients[data.draw(st.sampled_from(self.open_peers))]
        client.lookups[client.session.lookup(keys, self.now + 2.0)] = len(keys)
        self.post()

    @precondition(lambda self: self.open_peers)
    @rule(data=st.data(), keys=some_keys, wait=st.floats(0, 3), patience=st.floats(0.1, 9))
    def fetch(self, data: st.DataObject, keys: list[bytes], wait: float, patience: float) -> None:
        client = self.clients[data.draw(st.sampled_from(self.open_peers))]
        number = client.session.fetch(keys, wait, self.now + patience, self.now)
        client.fetches[number] = dict(enumerate(keys))
        self.post()

    @property
    def open_peers(self) -> list[bytes]:
        return [peer for peer in PEERS if self.clients[peer].session.state is State.OPEN]

    @rule(peer=peers, trouble=st.sampled_from(["goodbye", "disconnected", "unreachable", "server dies"]))
    def lose_the_session(self, peer: bytes, trouble: str) -> None:
        if trouble == "unreachable":
            self.hub.unreachable(peer)
        elif trouble == "server dies":
            self.books.close()
            self.start_server()
        else:
            self.leave(peer, trouble == "goodbye")

    def leave(self, peer: bytes, politely: bool) -> None:
        client = self.clients[peer]
        client.session.goodbye() if politely else client.session.disconnected()
        client.forget()
        self.post()

    # What the network does.

    @precondition(lambda self: self.network)
    @rule(
        fates=st.lists(st.tuples(st.sampled_from([1, 1, 1, 0, 2]), st.sampled_from([0, 0, 1, 5])), max_size=8)
    )
    def deliver(self, fates: list[tuple[int, int]]) -> None:
        """Messages arrive so many times, out of so many that are on their way."""
        for copies, ahead in fates[: len(self.network)]:
            message = self.network.pop(min(ahead, len(self.network) - 1))
            for _ in range(copies):
                self.hand_over(message)
            if copies == 2:
                self.network.append(message)
            self.link()

    @rule()
    def deliver_everything(self) -> None:
        for _ in range(200):
            if not self.network:
                break
            self.hand_over(self.network.pop(0))
            self.link()

    @rule(data=st.binary(max_size=30), peer=peers, to_server=st.booleans())
    def disturb(self, data: bytes, peer: bytes, to_server: bool) -> None:
        self.hand_over(Message(b"" if to_server else peer, peer, data))

    # What the owner does.

    @rule(key=st.sampled_from(KEYS))
    def begin_filling(self, key: bytes) -> None:
        catalog = self.catalog
        if key not in catalog.ready and key not in catalog.filling and catalog.make_room(1, [key]):
            catalog.reserve(key)

    @precondition(lambda self: self.catalog.filling)
    @rule(data=st.data(), well=st.booleans())
    def end_filling(self, data: st.DataObject, well: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.catalog.filling)))
        slot = self.catalog.filling[key]
        self.catalog.publish(key, slot, 64) if well else self.catalog.discard(key, slot)
        self.link()

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        if key in self.catalog.ready:
            self.catalog.remove(key)

    @rule()
    def link(self) -> None:
        """The owner takes a turn, and the server takes in what it says."""
        self.collect()
        while self.to_owner:
            message = decode_from_server(self.to_owner.popleft())
            if isinstance(message, Ask):
                self.answer(self.books.answer(message))
            elif isinstance(message, Release):
                self.books.release(message.slots)
            elif isinstance(message, Forget):
                self.books.forget(message.ticket)
        for news in self.books.news(self.now):
            self.answer(news)
        while self.to_hub:
            self.hub.answered(decode_from_owner(self.to_hub.popleft()), self.now)
        self.post()

    @rule(seconds=st.floats(0.01, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for client in self.clients.values():
            for event in client.session.expire(self.now):
                client.note(event)
        self.hub.expire(self.now)
        self.post()

    # Carriers.

    def hand_over(self, message: Message) -> None:
        if message.to:
            self.clients[message.to].hear(message)
        else:
            self.hub.received(message.sender, message.data, self.now)
        self.post()

    def answer(self, message: FromOwner) -> None:
        self.to_hub.append(encode_link(message))

    def collect(self) -> None:
        while self.hub.to_owner:
            self.to_owner.append(encode_link(self.hub.to_owner.popleft()))

    def post(self) -> None:
        """Put on the network what anybody has to say."""
        for peer, client in self.clients.items():
            outbox = client.session.outbox
            self.network += [Message(b"", peer, encode(message)) for message in outbox]
            outbox.clear()
        parcels = list(iter(self.hub.next_parcel, None))
        for parcel in parcels:
            assert self.catalog.key(parcel.slot) == parcel.key, "the slot holds something else"
            assert self.catalog.leases(parcel.slot) > 0, "nothing keeps the slot"
        for _, together in groupby(parcels, lambda parcel: (parcel.session.peer, parcel.id)):
            self.send(list(together))
        while self.hub.to_peers:
            peer, answer = self.hub.to_peers.popleft()
            self.network.append(Message(peer, b"", encode(answer)))
        self.collect()

    def send(self, parcels: list[Parcel]) -> None:
        """Chunks of one request: each by itself, or all that are offered."""
        session = parcels[0].session
        if session.transport == ZMQ:
            for p in parcels:
                message = Chunk(session.number, p.id, p.place, p.size)
                self.network.append(Message(session.peer, b"", encode(message), (p.key,)))
        else:
            offer = Offer(session.number, parcels[0].id, [(p.place, p.size, p.slot) for p in parcels])
            keys = tuple(p.key for p in parcels)
            self.network.append(Message(session.peer, b"", encode(offer), keys))

    # What always holds.

    @invariant()
    def leases_are_bounded_and_accounted_for(self) -> None:
        held = self.books.held
        assert self.hub.leases <= LIMITS.leases * len(PEERS)
        assert held.total() <= LIMITS.leases * len(PEERS) + sum(map(len, self.to_hub))
        assert all(self.catalog.leases(slot) == held[slot] for slot in range(SLOTS))

    @invariant()
    def what_is_held_for_a_client_stays_what_it_was(self) -> None:
        for session in self.hub._sessions.values():
            for fetch in session.fetches.values():
                for index, slot in fetch.held.items():
                    assert self.catalog.key(slot) == fetch.keys[index]

    def teardown(self) -> None:
        if not hasattr(self, "catalog"):
            return
        for _ in range(3):
            self.time_passes(10.0)
            self.link()
        assert self.hub.leases == 0
        assert not self.hub._tickets
        assert not self.books.held
        assert not self.books._waiting
        for client in self.clients.values():
            assert client.session.next_deadline == float("inf"), "a request is waited for after its deadline"
            assert not any(client.fetches.values())
            assert not client.lookups
        self.catalog.audit()
        assert all(self.catalog.state(slot) is not SlotState.DOOMED for slot in range(SLOTS))


TestPeers = Peers.TestCase
TestPeers.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
