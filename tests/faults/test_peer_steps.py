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
from dataclasses import replace

import msgspec
import pytest

from kvstore import ConfigError
from kvstore.peer.protocol import Hello, Message
from support.checkpoint import PAYLOAD
from support.pairs import BEGINNING, ENOUGH, SIDES, TIMEOUT, Pair, let_go_on, pair_over, strike, suffer
from support.peers import gate_of, no_leases, reader
from support.processes import wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

FAULTS = [signal.SIGKILL, signal.SIGSTOP]
STEPS = [*BEGINNING, "Lookup", "Found", "Fetch", "Offer", PAYLOAD, "Ack"]
#: For each state that a session can be in, a step that it takes there.
STATES = ["Hello", "Found", "Offer", PAYLOAD, "Ack"]


each_fault = pytest.mark.parametrize("number", FAULTS, ids=lambda number: number.name)


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield from pair_over()


@pytest.fixture
def pair_without_streams() -> Iterator[Pair]:
    """One whose chunks come beside the messages."""
    yield from pair_over(streams=False)


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
