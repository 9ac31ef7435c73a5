"""What happened to chunks: a bounded queue of events that counts what it had to drop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = ["Event", "EventKind", "EventQueue", "Locality"]

EventKind = Literal["stored", "removed", "promoted", "corrupt", "tier-down", "tier-up"]
Locality = Literal["local", "remote"]


class Event(NamedTuple):
    """Something that happened to chunks, or to a tier.

    Attributes
    ----------
    kind : str
        ``stored``: `target` has the chunks now. ``removed``: `source` has them no longer. ``promoted``: the
        host has them from `source`. ``corrupt``: `source` held something else under their keys.
        ``tier-down``, ``tier-up``: the breaker of `source` opened or closed (no keys); a tier may be down
        when it is opened.
    keys : tuple of bytes
    source, target : str or None
        Names of tiers; None where the chunks came from a caller, or went nowhere.
    locality : str
        ``local`` when only this machine is concerned, ``remote`` when the tier is seen by others.
    detail : str
        For people: why.
    """

    kind: EventKind
    keys: tuple[bytes, ...]
    source: str | None
    target: str | None
    locality: Locality
    detail: str = ""


class EventQueue:
    """Bounded first-in first-out queue; when it is full the oldest event is dropped and counted."""

    def __init__(self, limit: int = 65536) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self.dropped = 0

    def emit(self, event: Event) -> None:
        """Append `event`."""
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(event)

    def take(self) -> Iterator[Event]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, deque(maxlen=self._events.maxlen)
        return iter(events)
