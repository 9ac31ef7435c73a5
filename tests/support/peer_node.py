"""A store in a process of its own, on any machine of a test's network, with a main loop like an engine's.

The loop polls, does what the test tells it, and notes for how long its calls have kept it waiting. Chunks are
numbered; the node itself compares every byte with what belongs to the number.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import kvstore
from support.fleet import CHUNK, content, key_of

__all__ = ["Facts", "Node", "peer_tier"]

_ROOT = Path(__file__).parents[1]
#: Seconds between two rounds of the loop, and within which a node has to answer a test.
_ROUND, _ANSWER = 0.002, 90.0

Facts = dict[str, Any]
"""What a node tells of itself; see :meth:`_Loop.facts`."""


def peer_tier(address: str, name: str, timeout: float, **options: Any) -> dict[str, Any]:
    """A tier that reads the node at `address`, ``host:port``."""
    settings = {"name": name, "workers": 1, "transport": "zmq", "retries": 0, "timeout": f"{timeout}s"}
    return {"url": f"peer://{address}", **settings, "required": False, **options}


class Node:
    """The test's side of a node; a context manager, at whose end the process is killed.

    Parameters
    ----------
    prefix : sequence of str
        Of the command; it decides on which machine the node is.
    slots : int
        Of its host tier.
    tiers : sequence of dict
    options : Any
        Of the host tier, such as ``serve``.
    """

    def __init__(
        self, prefix: Sequence[str], slots: int, tiers: Sequence[dict[str, Any]] = (), **options: Any
    ) -> None:
        host = {"url": "ram://", "capacity": slots * CHUNK, "pin": "off", "transport": "zmq", **options}
        self._connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "support.peer_node", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
            )
        self._connection.send([host, *tiers])

    def __enter__(self) -> Node:
        self._receive()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._connection.close()

    def kill(self) -> None:
        """End it at once; its workers end by themselves."""
        self.process.kill()
        self.process.wait()

    def put(self, numbers: Iterable[int]) -> None:
        """Store chunks."""
        self._call("put", list(numbers))

    def compute(self, numbers: Iterable[int]) -> None:
        """Begin to fill chunks."""
        self._call("compute", list(numbers))

    def commit(self) -> None:
        """End everything that was begun, well."""
        self._call("commit")

    def ask(self, numbers: Iterable[int]) -> None:
        """Begin to bring chunks into host memory."""
        self._call("ask", list(numbers))

    def answer(self) -> set[int]:
        """Wait until everything that was asked for has been answered; which chunks are there, verified."""
        return set(self._call("answer"))

    def get(self, numbers: Iterable[int]) -> set[int]:
        """Bring chunks into host memory; which are there, verified."""
        self.ask(numbers)
        return self.answer()

    def facts(self) -> Facts:
        """What there is to know."""
        found = self._call("facts")
        assert isinstance(found, dict)
        return found

    def audit(self) -> None:
        """Prove that no slot is lost; empties host memory."""
        self._call("audit")

    def _call(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        return self._receive()

    def _receive(self) -> Any:
        assert self._connection.poll(_ANSWER), "the node does not answer"
        went_well, answer = self._connection.recv()
        assert went_well, answer
        return answer


class _Loop:
    """The node's side."""

    def __init__(self, tiers: list[dict[str, Any]]) -> None:
        config = kvstore.StoreConfig.from_dict({"tiers": tiers, "chunk_size": CHUNK, "engine": "processes"})
        self._store = kvstore.open(config=config)
        self._open: list[tuple[ExitStack, Any]] = []
        self._jobs: list[tuple[list[int], Any]] = []
        self._longest = 0.0

    def run(self, connection: Connection) -> None:
        """Until the test hangs up."""
        connection.send((True, None))
        while True:
            while not connection.poll(_ROUND):
                self.turn()
            name, arguments = connection.recv()
            try:
                connection.send((True, getattr(self, name)(*arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))

    def turn(self) -> None:
        self._timed(self._store.poll)

    def put(self, numbers: list[int]) -> None:
        self._store.put_many({key_of(number): content(number) for number in numbers})

    def compute(self, numbers: list[int]) -> None:
        stack = ExitStack()
        lease = stack.enter_context(self._store.reserve([key_of(number) for number in numbers]))
        for number in numbers:
            lease[key_of(number)][:] = content(number)
        self._open.append((stack, lease))

    def commit(self) -> None:
        while self._open:
            stack, lease = self._open.pop()
            with stack:
                lease.commit()

    def ask(self, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        self._timed(partial(self._store.lookup, keys))
        self._jobs.append((numbers, self._timed(partial(self._store.prefetch, keys))))

    def answer(self) -> list[int]:
        found: list[int] = []
        while self._jobs:
            numbers, job = self._jobs.pop()
            while not job.done():
                self.turn()
                time.sleep(_ROUND)
            found += self._verified(numbers)
        return found

    def _verified(self, numbers: list[int]) -> list[int]:
        found = []
        with self._store.read([key_of(number) for number in numbers]) as lease:
            for number in numbers:
                if key_of(number) in lease:
                    assert lease[key_of(number)] == content(number), f"wrong bytes for chunk {number}"
                    found.append(number)
        return found

    def facts(self) -> Facts:
        """``asleep`` is the longest that a call of the loop has slept, in seconds, since the last look."""
        asleep, self._longest = self._longest, 0.0
        stats, gate = self._store.stats(), self._store._peers
        links = gate._links.values() if gate else ()
        return {
            "leases": gate.leases if gate else 0,
            "waits": sum(len(link.books._waiting) for link in links),
            "leased": stats.leased,
            "quarantined": stats.quarantined,
            "breakers": {tier.name: tier.breaker.read for tier in stats.tiers[1:]},
            "reads": {tier.name: tier.counters["reads"] for tier in stats.tiers[1:]},
            "served": stats.host.custom.get("peer_chunks", 0),
            "processes": [*self._store._engine.pids, *(gate.pids if gate else ())],
            "asleep": asleep,
        }

    def audit(self) -> None:
        store = self._store
        store._catalog.audit()
        with store.reserve([os.urandom(16) for _ in range(store.stats().slots)]) as lease:
            assert len(lease) == store.stats().slots
            lease.abort()

    def _timed(self, call: Callable[[], Any]) -> Any:
        """Time that the processors had no room for the thread, or spent on it, is not what it waited for."""
        began, busy = time.perf_counter(), _not_asleep()
        result = call()
        self._longest = max(self._longest, time.perf_counter() - began - (_not_asleep() - busy))
        return result


def _not_asleep() -> float:
    """Seconds that this thread has run, or waited for a processor, so far."""
    _, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.thread_time() + int(waited) / 1e9


if __name__ == "__main__":
    told = Connection(int(sys.argv[1]))
    try:
        _Loop(told.recv()).run(told)
    except EOFError:  # the test is over
        pass
