"""The owner's books on one serving process: which slots it holds, and what it waits for. No I/O."""

from __future__ import annotations

from collections import Counter

from ..catalog import Catalog
from ..peer.link import COMING_SLOT, MISSING_SLOT, Ask, Lent, Located, Row
from ..peer.protocol import COMING, HERE, MISSING

__all__ = ["Books"]

#: Seconds between two looks for keys that were being filled and have not come.
_LOOK_EVERY = 0.05


class Books:
    """Lends slots of a catalog, whose lock the caller holds. To be read by a peer is no use of a chunk: it
    does not change what leaves host memory first.

    Attributes
    ----------
    held : Counter
        Slot -> leases.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.held: Counter[int] = Counter()
        self._catalog = catalog
        self._waiting: dict[int, dict[int, bytes]] = {}  # ticket -> place -> key
        self._published = -1  # what the catalog had published at the last look
        self._next_look = 0.0

    def answer(self, ask: Ask) -> Located | Lent:
        """Where the keys are; with leases, if those are asked for."""
        ready, filling = self._catalog.ready, self._catalog.filling
        if not ask.lease:
            states = (HERE if k in ready else COMING if k in filling else MISSING for k in ask.keys)
            return Located(ask.ticket, bytes(states))
        rows = [self._lend(place, key) for place, key in enumerate(ask.keys)]
        coming = {place: ask.keys[place] for place, slot, _, _ in rows if slot == COMING_SLOT}
        if coming:
            self._waiting[ask.ticket] = coming
        return Lent(ask.ticket, rows)

    def release(self, slots: list[int]) -> None:
        """End one lease on each of `slots`; what is not held is ignored."""
        for slot in slots:
            if self.held[slot] > 0:
                self.held[slot] -= 1
                self._catalog.drop(slot)
            if not self.held[slot]:
                del self.held[slot]

    def forget(self, ticket: int) -> None:
        """Nobody waits for the rest of this answer."""
        self._waiting.pop(ticket, None)

    def news(self, now: float) -> list[Lent]:
        """What has become of keys that were being filled; at once when chunks came, soon when they did not.

        Parameters
        ----------
        now : float
            Seconds, by any monotonic clock.
        """
        if not self._waiting:
            return []
        published = self._catalog.published
        if published == self._published and now < self._next_look:
            return []
        self._published, self._next_look = published, now + _LOOK_EVERY
        found = []
        for ticket, coming in list(self._waiting.items()):
            rows = [row for place, key in coming.items() if (row := self._lend(place, key))[1] != COMING_SLOT]
            for place, _, _, _ in rows:
                del coming[place]
            if not coming:
                del self._waiting[ticket]
            if rows:
                found.append(Lent(ticket, rows))
        return found

    def close(self) -> None:
        """End everything: the process is gone."""
        self._waiting.clear()
        self.release(list(self.held.elements()))

    def _lend(self, place: int, key: bytes) -> Row:
        slot = self._catalog.ready.get(key)
        if slot is None:
            return (place, COMING_SLOT if key in self._catalog.filling else MISSING_SLOT, 0, 0)
        self._catalog.hold(slot)
        self.held[slot] += 1
        return (place, slot, self._catalog.length(slot), self._catalog.generation(slot))
