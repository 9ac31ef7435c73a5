"""Three nodes: one computes a prefix, one decodes what is still being computed, and one takes over requests
with prefixes that only the first has computed. One of them dies in the middle.

Each is a machine of its own where there may be network namespaces, else a process. All bytes are verified.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from support.object_store import free_ports
from support.peer_node import Node, peer_tier
from support.places import Bridge, Loopback, why_no_namespaces
from support.processes import stopped, wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

#: Seconds of an operation of a peer's tier; that the peer has died is noticed long before.
TIMEOUT = 40.0
ENOUGH = 60.0
PREFIX = set(range(100))


@dataclass
class Nodes:
    """`balance` reads `prefill`; `decode` reads both, `prefill` first; all serve."""

    prefill: Node
    balance: Node
    decode: Node

    def is_whole(self, *nodes: Node) -> None:
        """Check that nobody holds anything of these nodes any more, and that no slot of theirs is lost."""
        for node in nodes:
            wait_for(lambda: node.facts()["leases"] == 0, ENOUGH)  # noqa: B023
            wait_for(lambda: node.facts()["quarantined"] == 0, ENOUGH)  # noqa: B023
            node.audit()


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    timeout = getattr(request, "param", TIMEOUT)
    kind = Loopback if why_no_namespaces() else Bridge
    ports = free_ports(3)
    with kind(3) as network:
        addresses = [f"{network.host(place)}:{port}" for place, port in enumerate(ports)]
        prefill, balance = (
            peer_tier(addresses[place], name, timeout) for place, name in enumerate(("prefill", "balance"))
        )
        tiers = [[], [prefill], [prefill, balance]]
        first, second, third = (
            Node(network.prefix(place), 160, tiers[place], serve=f"tcp://{addresses[place]}")
            for place in range(3)
        )
        with first, second, third:
            yield Nodes(first, second, third)


def waits(prefill: Node) -> bool:
    """Whether anybody waits for what is being computed."""
    return bool(prefill.facts()["waits"])


def test_decode_takes_over_what_prefill_is_computing(nodes: Nodes) -> None:
    nodes.prefill.put(range(8))
    for chunk in range(8, 16):
        nodes.prefill.compute([chunk])
        nodes.decode.ask(range(chunk + 1))
        wait_for(lambda: waits(nodes.prefill), ENOUGH)
        nodes.prefill.commit()
        assert nodes.decode.answer() == set(range(chunk + 1))
    assert nodes.decode.facts()["reads"] == {"prefill": 16, "balance": 0}
    nodes.is_whole(nodes.prefill, nodes.decode)


def test_a_prefix_that_only_prefill_has_computed_is_served_by_the_balancing_node(nodes: Nodes) -> None:
    nodes.prefill.put(PREFIX)
    assert nodes.balance.get(PREFIX) == PREFIX
    assert nodes.balance.facts()["reads"] == {"prefill": len(PREFIX)}
    nodes.prefill.kill()
    assert nodes.decode.get(PREFIX) == PREFIX
    assert nodes.decode.facts()["reads"] == {"prefill": 0, "balance": len(PREFIX)}
    nodes.is_whole(nodes.balance, nodes.decode)


def test_prefill_dies_while_it_is_read(nodes: Nodes) -> None:
    """What has been computed is on two nodes, and comes whole; what has not is a miss."""
    nodes.prefill.put(PREFIX)
    nodes.balance.get(PREFIX)
    nodes.prefill.compute([100])
    nodes.decode.ask([100])
    wait_for(lambda: waits(nodes.prefill), ENOUGH)
    nodes.decode.ask(PREFIX)
    began = time.monotonic()
    nodes.prefill.kill()
    assert nodes.decode.answer() == PREFIX
    assert time.monotonic() - began < TIMEOUT / 2
    nodes.is_whole(nodes.balance, nodes.decode)


def test_the_balancing_node_dies_while_it_is_read(nodes: Nodes) -> None:
    nodes.balance.put(range(50))
    nodes.prefill.put(range(50, 100))
    nodes.decode.ask(PREFIX)
    nodes.balance.kill()
    assert set(range(50, 100)) <= nodes.decode.answer() <= PREFIX
    nodes.is_whole(nodes.prefill, nodes.decode)


impatient = pytest.mark.parametrize("nodes", [4.0], indirect=True, ids=["impatient"])


@impatient
def test_prefill_hangs(nodes: Nodes) -> None:
    """Its serving process lives, but nobody tells it what is there."""
    nodes.prefill.put(PREFIX)
    assert nodes.balance.get(PREFIX) == PREFIX
    with stopped([nodes.prefill.process.pid]):
        assert nodes.decode.get(PREFIX) == PREFIX
        assert nodes.decode.facts()["reads"] == {"prefill": 0, "balance": len(PREFIX)}
    wait_for(partial(comes, nodes, itertools.count(200)), ENOUGH)
    nodes.is_whole(nodes.prefill, nodes.balance, nodes.decode)


def comes(nodes: Nodes, numbers: Iterator[int]) -> bool:
    """Whether a chunk that nobody has asked for yet comes from `prefill`."""
    number = next(numbers)
    nodes.prefill.put([number])
    return nodes.decode.get([number]) == {number}


@impatient
def test_decode_dies_while_it_reads(nodes: Nodes) -> None:
    """What it holds is given back when its patience would have been over."""
    nodes.prefill.put(PREFIX)
    nodes.prefill.compute([100])
    nodes.decode.ask([100])
    wait_for(lambda: waits(nodes.prefill), ENOUGH)
    nodes.decode.ask(PREFIX)
    nodes.decode.kill()
    nodes.prefill.commit()
    assert nodes.balance.get([*PREFIX, 100]) == {*PREFIX, 100}
    nodes.is_whole(nodes.prefill, nodes.balance)
