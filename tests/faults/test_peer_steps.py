"""A peer and its reader, each killed, and each stopped and let go on, at every step of what they say to each
other.

Whatever has come is right, the rest is a miss in good time; afterwards chunks come again, and no lease and
no slot is lost on either side.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import pytest

import kvstore
from kvstore import ConfigError
from kvstore.peer.protocol import Hello, Message
from support.checkpoint import PAYLOAD, Checkpoint
from support.peers import CHUNK, evict, gate_of, no_leases, reader, server
from support.processes import has_ended, wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

#: Seconds of an operation of the tier, and within which whatever is asked has to be answered, hung or not.
TIMEOUT = 1.0
ENOUGH = 60.0
FAULTS = [signal.SIGKILL, signal.SIGSTOP]
SIDES = ["serving", "reading"]
BEGINNING = ["Hello", "Welcome"]
STEPS = [*BEGINNING, "Lookup", "Found", "Fetch", "Offer", PAYLOAD, "Ack"]
#: For each state that a session can be in, a step that it takes there.
STATES = ["Hello", "Found", "Offer", PAYLOAD, "Ack"]


@dataclass
class Pair:
    """A store that serves, one that reads in a worker process, and what is between them."""

    owner: kvstore.Store
    between: Checkpoint
    store: kvstore.Store
    data: dict[bytes, bytes] = field(default_factory=dict)  # what the reader was asked for last
    jobs: list[kvstore.Job[kvstore.Prefetched]] = field(default_factory=list)

    def pid(self, side: str) -> int:
        """The process that serves, or the one that reads; there may be two for as long as one replaces the
        other."""

        def found() -> list[int]:
            self.store.poll()
            self.owner.poll()
            return self.store._engine.pids if side == "reading" else gate_of(self.owner).pids

        wait_for(lambda: len(found()) == 1, ENOUGH)
        return found()[0]

    def comes(self) -> bool:
        """Whether a chunk that nobody has asked for yet comes over."""
        key = os.urandom(16)
        self.owner.put(key, key)
        found = self.store.get(key, timeout=ENOUGH)
        self.owner.delete([key])  # it must not drive out others
        return found == key

    def ask(self, step: str) -> None:
        """Do what leads to `step`, and return when the pair has got there."""
        if step in BEGINNING:
            before = self.between.handshakes
            self.between.cut()
            wait_for(lambda: self.between.handshakes >= before + 2, ENOUGH)
        wait_for(lambda: self.gets_to(step), ENOUGH)

    def gets_to(self, step: str) -> bool:
        """Ask for chunks that nobody has asked for yet; whether that leads to `step`."""
        self.owner.delete(self.data)
        self.data = {os.urandom(16): os.urandom(CHUNK - 100 * number) for number in range(4)}
        self.owner.put_many(self.data)
        if step in ("Lookup", "Found"):
            self.store.lookup(list(self.data))
        self.jobs.append(self.store.prefetch(list(self.data)))
        return self.between.has_arrival(TIMEOUT)

    def check(self) -> None:
        """Nothing is lost: chunks come, and either side has all of its slots."""
        found = self.store.get_many(self.data, tiers=())
        assert found == {key: self.data[key] for key in found}
        self.owner.delete(self.data)
        wait_for(self.comes, ENOUGH)
        no_leases(self.owner)
        wait_for(lambda: not (self.store.stats().promoting or self.store.stats().quarantined), ENOUGH)
        evict(self.store)

    def settle(self) -> None:
        """Wait until everything that was asked for has been answered."""
        while self.jobs:
            self.jobs.pop().result(timeout=ENOUGH)


def pair_over(*, streams: bool) -> Iterator[Pair]:
    with server(slots=16) as owner:
        assert owner.served_at is not None
        host, port = owner.served_at.removeprefix("tcp://").split(":")
        with Checkpoint((host, int(port)), streams=streams) as between:
            options = f"&timeout={TIMEOUT}s&retries=0&required=false"
            with reader(between.url, options, slots=16, engine="processes") as store:
                pair = Pair(owner, between, store)
                wait_for(pair.comes, ENOUGH)
                yield pair


each_fault = pytest.mark.parametrize("number", FAULTS, ids=lambda number: number.name)


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield from pair_over(streams=True)


@pytest.fixture
def pair_without_streams() -> Iterator[Pair]:
    """One whose chunks come beside the messages."""
    yield from pair_over(streams=False)


def suffer(pair: Pair, side: str, number: signal.Signals, step: str) -> None:
    """One fault, and whether everything is as before."""
    with pair.between.stopping(step):
        pair.ask(step)
        pid = pair.pid(side)
        strike(pid, number)
    pair.settle()
    let_go_on(pid)
    pair.check()


def strike(pid: int, number: signal.Signals) -> None:
    """Kill or stop a process, unless it has ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    assert number == signal.SIGSTOP or has_ended(pid, ENOUGH)


def let_go_on(pid: int) -> None:
    """Wake who was stopped, unless it has been replaced."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_each_step(pair: Pair, step: str) -> None:
    for side in SIDES:
        suffer(pair, side, signal.SIGKILL, step)


def test_killed_amid_payload_that_comes_beside_the_messages(pair_without_streams: Pair) -> None:
    for side in SIDES:
        suffer(pair_without_streams, side, signal.SIGKILL, PAYLOAD)


@pytest.mark.parametrize("step", STATES)
def test_hung_in_each_state(pair: Pair, step: str) -> None:
    for side in SIDES:
        suffer(pair, side, signal.SIGSTOP, step)


@each_fault
def test_while_a_chunk_is_being_computed(pair: Pair, number: signal.Signals) -> None:
    for side in SIDES:
        keys = [os.urandom(16) for _ in range(8)]
        with pair.owner.reserve(keys) as lease:
            wait_for(lambda: is_waited_for(pair, keys.pop()), ENOUGH)  # noqa: B023
            pid = pair.pid(side)
            strike(pid, number)
            pair.settle()
            lease.abort()
        let_go_on(pid)
        pair.check()


def is_waited_for(pair: Pair, key: bytes) -> bool:
    """Ask for a chunk that is being computed; whether the owner finds that it is waited for."""
    job = pair.store.prefetch([key])
    pair.jobs.append(job)
    gate = gate_of(pair.owner)
    wait_for(lambda: job.done() or any(link.books._waiting for link in gate._links.values()), ENOUGH)
    return not job.done()


@pytest.mark.parametrize("side", SIDES)
@each_fault
def test_at_goodbye(pair: Pair, number: signal.Signals, side: str) -> None:
    """The reader closes in time, whoever hears it."""
    pid = pair.pid(side)
    with pair.between.stopping("Goodbye"):
        closing = threading.Thread(target=pair.store.close, args=(3 * TIMEOUT,))
        closing.start()
        assert pair.between.has_arrival(ENOUGH)
        strike(pid, number)
    closing.join(ENOUGH)
    assert not closing.is_alive()
    let_go_on(pid)
    no_leases(pair.owner)
    with reader(pair.between.url, slots=16) as another:
        assert replace(pair, store=another).comes()


def newer(message: Message) -> Message:
    """A hello of a later version."""
    if isinstance(message, Hello):
        return msgspec.structs.replace(message, version=message.version + 1)
    return message


def test_versions_that_differ_for_a_while(pair: Pair) -> None:
    """A reader is replaced by a newer one before its peer is: misses that say why, and then chunks again."""
    pair.between.rewrite = newer
    pair.between.cut()
    wait_for(lambda: not pair.comes() and "version" in pair.store.stats().tier("peer").last_error, ENOUGH)
    with pytest.raises(ConfigError, match="version"):
        reader(pair.between.url, f"&timeout={ENOUGH}s")
    pair.between.rewrite = None
    pair.check()
