"""What one peer may have and ask at a time."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Bucket", "Limits"]


class Limits(NamedTuple):
    """Bounds of a server.

    Attributes
    ----------
    peers : int
        Sessions; the one that was silent for longest, and has no lease, makes room for another.
    leases : int
        Slots that one peer may hold, or have asked the owner for, at a time.
    keys : int
        Keys of one peer's fetches that may be waiting.
    rate : float
        Keys per second that one peer may name.
    hold : float
        Seconds that a lease lasts at most, whatever the peer asks for.
    """

    peers: int = 256
    leases: int = 64
    keys: int = 1024
    rate: float = 200_000.0
    hold: float = 30.0


class Bucket:
    """Lets through `rate` per second, and what one second brings at once after a rest."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = rate
        self._seen: float | None = None

    def take(self, count: int, now: float) -> bool:
        """Whether `count` more may pass at time `now`."""
        if self._seen is not None:
            self._level = min(self._rate, self._level + (now - self._seen) * self._rate)
        self._seen = now
        if count > self._level:
            return False
        self._level -= count
        return True
