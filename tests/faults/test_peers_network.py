"""Peers on machines of their own, and what networks do: packets that are lost or late, links that are slow or
cut, for good or for a while, in one direction or both.

The machines are network namespaces. What joins them is the kernel's: cables, a switch and its queueing
disciplines; or packets are passed on by the test itself, which can also lose and delay them where the kernel
has no netem.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from support.fleet import CHUNK, content, key_of
from support.peer_node import Node, peer_tier
from support.places import Bridge, Network, why_no_namespaces, why_no_netem
from support.processes import wait_for
from support.relay import Relay

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")
pytestmark = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())

needs_relay = pytest.mark.skipif(bool(Relay.why_not()), reason=Relay.why_not())
needs_netem = pytest.mark.skipif(bool(why_no_netem()), reason=why_no_netem())

PORT = 5710
#: Seconds of an operation of the peer's tier.
TIMEOUT = 1.2
#: Seconds within which two machines that reach each other again have to find that out.
ENOUGH = 60.0
TOKEN = {"token": "a token that both know"}
ON_DISK = range(10_000, 10_004)


class Pair:
    """A node that serves at place 0, and one at place 1 that reads it, with a directory as its next tier."""

    def __init__(self, network: Network, disk: Path, timeout: float) -> None:
        self.numbers = itertools.count(20_000)
        address = f"{network.host(0)}:{PORT}"
        self.serving = {"serve": f"tcp://{address}", "storage_options": TOKEN}
        self.owner = Node(network.prefix(0), 128, **self.serving)
        peer = peer_tier(address, "peer", timeout, storage_options=TOKEN)
        next_tier = {"url": f"file://{disk}", "name": "disk", "write": "off", "workers": 1}
        self.store = Node(network.prefix(1), 128, [peer, next_tier])

    def waits(self) -> bool:
        """Whether a chunk that the owner has just begun to compute is waited for; until it is, one after the
        other is begun."""
        number = next(self.numbers)
        self.owner.compute([number])
        self.store.ask([number])
        return any(self.owner.facts()["waits"] for _ in range(20))

    def comes(self) -> bool:
        """Whether a chunk that nobody has asked for yet comes over."""
        number = next(self.numbers)
        self.owner.put([number])
        return self.store.get([number]) == {number}

    def opens_its_breaker(self) -> bool:
        """Whether the peer is left alone, after it has been asked once more."""
        self.store.get([next(self.numbers)])
        return bool(self.store.facts()["breakers"]["peer"] != "closed")

    def is_as_before(self) -> None:
        """Wait until chunks come again, and check that either side has all that is its own."""
        wait_for(self.comes, ENOUGH)
        assert self.store.facts()["breakers"]["peer"] == "closed"
        wait_for(lambda: self.owner.facts()["leases"] == 0, ENOUGH)
        wait_for(lambda: self.store.facts()["quarantined"] == 0, ENOUGH)
        self.owner.audit()
        self.store.audit()


@contextmanager
def pair_on(network: Network, disk: Path, timeout: float = TIMEOUT) -> Iterator[Pair]:
    pair = Pair(network, disk, timeout)
    with pair.owner, pair.store:
        wait_for(pair.comes, ENOUGH)
        yield pair


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory that holds `ON_DISK`."""
    host = f"ram://?capacity={8 * CHUNK}&pin=off"
    with kvstore.open(host, f"file://{tmp_path}", chunk_size=CHUNK) as store:
        store.put_many({key_of(number): content(number) for number in ON_DISK})
    return tmp_path


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    with Bridge(2) as network:
        yield network


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay(2) as network:
        yield network


def suffer(pair: Pair, cut: Callable[[], Any], mend: Callable[[], Any]) -> None:
    """Cut while a chunk is waited for and others are on their way; everything about it, until all is well."""
    pair.owner.put(range(64))
    wait_for(pair.waits, ENOUGH)
    for node in (pair.owner, pair.store):
        node.facts()  # forgets how long calls have been asleep so far
    pair.store.ask(range(64))
    cut()
    pair.owner.commit()
    pair.store.answer()
    wait_for(pair.opens_its_breaker, ENOUGH)
    assert pair.store.get(ON_DISK) == set(ON_DISK)
    assert pair.store.facts()["asleep"] < TIMEOUT / 2
    wait_for(lambda: pair.owner.facts()["leases"] == 0, ENOUGH)
    mend()
    pair.is_as_before()
    assert pair.owner.facts()["asleep"] < TIMEOUT / 2


def test_a_link_that_is_cut(bridge: Bridge, disk: Path) -> None:
    with pair_on(bridge, disk) as pair:
        suffer(pair, lambda: bridge.cut(0), lambda: bridge.mend(0))


@needs_relay
@pytest.mark.parametrize("ways", [(0, 1), (1, 0)], ids=["answers are lost", "requests are lost"])
def test_a_link_that_is_cut_in_one_direction(relay: Relay, disk: Path, ways: tuple[int, int]) -> None:
    with pair_on(relay, disk) as pair:
        suffer(pair, lambda: relay.cut_way(*ways), lambda: relay.mend(0))


@needs_relay
def test_packets_that_are_lost_late_and_out_of_order(relay: Relay, disk: Path) -> None:
    with pair_on(relay, disk, timeout=60.0) as pair:
        relay.delay, relay.jitter, relay.loss = 0.01, 0.01, 0.02
        pair.owner.put(range(64))
        assert pair.store.get(range(64)) == set(range(64))
        assert relay.lost > 0
        relay.delay = relay.jitter = relay.loss = 0.0
        pair.is_as_before()


@needs_netem
def test_packets_that_the_kernel_loses_and_delays(bridge: Bridge, disk: Path) -> None:
    with pair_on(bridge, disk, timeout=60.0) as pair:
        for place in (0, 1):
            bridge.shape(place, "netem delay 10ms 10ms loss 2%")
        pair.owner.put(range(64))
        assert pair.store.get(range(64)) == set(range(64))
        for place in (0, 1):
            bridge.unshape(place)
        pair.is_as_before()


def test_a_link_that_is_too_slow(bridge: Bridge, disk: Path) -> None:
    """What comes in time is right, the rest a miss; the peer is left alone until the link is faster."""
    with pair_on(bridge, disk) as pair:
        bridge.shape(1, "tbf rate 500kbit burst 16kb latency 1s")
        pair.owner.put(range(64))
        pair.store.facts()
        assert pair.store.get(range(64)) < set(range(64))
        assert pair.store.get(ON_DISK) == set(ON_DISK)
        assert pair.store.facts()["asleep"] < TIMEOUT / 2
        bridge.unshape(1)
        pair.is_as_before()


DIAL = """
import sys
from kvstore.address import Address
from kvstore.peer.credentials import ClientCredentials
from kvstore.peer.zmq_carrier import ZmqClientCarrier
carrier = ZmqClientCarrier(Address.parse(sys.argv[1]), ClientCredentials.of({}, ""), 4096)
sys.stdin.read()
"""


@needs_relay
def test_a_try_to_connect_does_not_outlast_the_outage(relay: Relay) -> None:
    """The kernel would go on with the first for minutes, ever more seldom."""
    relay.cut(0)
    command = [*relay.prefix(1), sys.executable, "-c", DIAL, f"{relay.host(0)}:{PORT}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
        wait_for(lambda: len(relay.dials) >= 2, ENOUGH)
        program.kill()


@needs_relay
def test_a_machine_that_is_gone_without_a_word_and_returns(relay: Relay, disk: Path) -> None:
    """Its connections are half open; where it was there is another arena."""
    with pair_on(relay, disk) as pair:
        relay.cut(0)
        pair.owner.kill()
        pair.store.get(range(4))
        with Node(relay.prefix(0), 64, **pair.serving) as pair.owner:
            relay.mend(0)
            pair.is_as_before()


@needs_relay
def test_a_reader_that_is_gone_without_a_word(relay: Relay, disk: Path) -> None:
    """Nobody tells the owner, and yet it gets back what it has lent for a chunk that was waited for."""
    with pair_on(relay, disk, timeout=4.0) as pair:
        wait_for(pair.waits, ENOUGH)
        relay.cut(1)
        pair.owner.commit()
        wait_for(lambda: pair.owner.facts()["leases"], ENOUGH)
        pair.store.kill()
        wait_for(lambda: pair.owner.facts()["leases"] == 0, ENOUGH)
        pair.owner.audit()
