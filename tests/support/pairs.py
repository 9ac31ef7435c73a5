"""Two stores, one of which serves and one reads, and what may strike either side at any step between them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import kvstore
from support.checkpoint import Checkpoint
from support.peers import CHUNK, evict, gate_of, no_leases, reader, server
from support.processes import has_ended, wait_for

__all__ = ["BEGINNING", "ENOUGH", "SIDES", "TIMEOUT", "Pair", "let_go_on", "pair_over", "strike", "suffer"]

#: Seconds of an operation of the tier, and within which whatever is asked has to be answered, hung or not.
TIMEOUT = 1.0
ENOUGH = 60.0
SIDES = ["serving", "reading"]
BEGINNING = ["Hello", "Welcome"]


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


def pair_over(*, streams: bool = True, transport: str = "zmq") -> Iterator[Pair]:
    """Connected, and a chunk has come over."""
    with server(slots=16, transport=transport) as owner:
        assert owner.served_at is not None
        host, port = owner.served_at.removeprefix("tcp://").split(":")
        with Checkpoint((host, int(port)), streams=streams) as between:
            options = f"&timeout={TIMEOUT}s&retries=0&required=false"
            with reader(between.url, options, slots=16, transport=transport, engine="processes") as store:
                pair = Pair(owner, between, store)
                wait_for(pair.comes, ENOUGH)
                yield pair


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
