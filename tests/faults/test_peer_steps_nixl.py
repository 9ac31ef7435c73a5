"""A peer and its reader over NIXL, each killed, and each stopped and let go on, at every step between them.

What passes here is what they say; the bytes are read past it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.pairs import BEGINNING, SIDES, Pair, pair_over, suffer
from support.peers import needs_nixl

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

pytestmark = needs_nixl

STEPS = [*BEGINNING, "Lookup", "Found", "Fetch", "Offer", "Ack"]
#: For each state that a session can be in, a step that it takes there.
STATES = ["Hello", "Found", "Offer", "Ack"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    for pair in pair_over(transport="nixl"):
        assert pair.store.stats().tier("peer").custom["peer_nixl"]
        yield pair


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_each_step(pair: Pair, step: str) -> None:
    for side in SIDES:
        suffer(pair, side, signal.SIGKILL, step)


@pytest.mark.parametrize("step", STATES)
def test_hung_in_each_state(pair: Pair, step: str) -> None:
    for side in SIDES:
        suffer(pair, side, signal.SIGSTOP, step)
