"""How threads that wait for a store share its one descriptor.

One of them leads: it waits on the descriptor of the engine, and what it collects wakes the others. To lead is
a claim that runs out, so that a leader that an exception has taken away, such as Ctrl-C, is in nobody's way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

__all__ = ["Source", "Waiter", "Waiters"]

#: Longest that a waiting thread goes without looking at deadlines and at what others have released (seconds).
_TICK = 0.01


class Source(Protocol):
    """An engine, or what stands before it."""

    def wait(self, timeout: float) -> None:
        """Return when there is something to report, or after `timeout` seconds."""


class Waiters:
    """The threads that wait for one store; its lock is held for everything but :meth:`Waiter.sleep`.

    Parameters
    ----------
    source : Source
        What they wait for.

    Attributes
    ----------
    leader : Waiter, optional
        Who waits on the descriptor.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.leader: Waiter | None = None
        self._followed = False
        self._gate = _shut_gate()

    def tell(self) -> None:
        """Something has changed that others may wait for."""
        if self._followed:
            self._followed = False
            gate, self._gate = self._gate, _shut_gate()
            gate.release()

    def follow(self) -> threading.Lock:
        """A lock that is released when there is something to tell."""
        self._followed = True
        return self._gate


class Waiter:
    """One thread that waits until ``ready()``, or until the time `deadline`."""

    def __init__(self, others: Waiters, ready: Callable[[], bool], deadline: float) -> None:
        self._others = others
        self._ready = ready
        self._deadline = deadline
        self._pause = 0.0
        self._gate: threading.Lock | None = None  # of one who follows
        self._leads_until = 0.0

    def look(self, now: float) -> bool | None:
        """Whether it is ready, False when the time is over, None when it must :meth:`sleep`."""
        others, ready = self._others, self._ready()
        if ready or now >= self._deadline:
            if others.leader is self:
                others.leader = None
                others.tell()
            return ready
        self._pause = min(_TICK, self._deadline - now)
        leader = others.leader
        if leader is None or leader is self or now >= leader._leads_until:
            others.leader = self
            self._leads_until = now + 2 * _TICK
            self._gate = None
        else:
            self._gate = others.follow()
        return None

    def sleep(self) -> None:
        """Wait for news, no longer than a tick; without the lock."""
        if self._gate is None:
            with suppress(ValueError):  # the descriptor has gone with the store: the next turn says so
                self._others.source.wait(self._pause)
        elif self._gate.acquire(timeout=self._pause):
            self._gate.release()  # for the next one


def _shut_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate
