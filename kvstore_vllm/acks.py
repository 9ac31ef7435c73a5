"""What the ranks tell the scheduler about their copies, in words of the arena's control page.

Layout: the page is split evenly among the ranks; each rank's part, and only that rank writes there, is made
of words of 8 bytes::

    0   highest ticket up to which every store of this rank has finished
    1   the same for loads
    2   highest failed ticket that the ring has lost
    3.. a ring of the latest failed tickets; 0 is an empty place

Invariant: a failed ticket is recorded before it is acknowledged, so who reads the acknowledgement first and
the failures next misses none.
"""

from __future__ import annotations

from typing import Literal

from kvstore.errors import ConfigError

__all__ = ["AckWords", "Direction"]

#: "store" is device to host, "load" is host to device.
Direction = Literal["store", "load"]

_WORD = 8
_LOST = 2
_RING = 3
_LARGEST_PART = 64  # words; more failures than that at once need no telling apart


class AckWords:
    """Acknowledged and failed tickets of all ranks.

    Parameters
    ----------
    control : memoryview
        `Arena.control`: zero at first, shared by all who use the arena.
    world_size : int
        Number of ranks.
    writers : int, optional
        How many leading ranks store, where not all do; loads are everybody's.

    Raises
    ------
    ConfigError
        The page has no room for so many ranks.
    """

    def __init__(self, control: memoryview, world_size: int, writers: int | None = None) -> None:
        self._words = control[: len(control) // _WORD * _WORD].cast("B").cast("Q")
        self._part = min(_LARGEST_PART, len(self._words) // world_size)
        if self._part <= _RING:
            raise ConfigError(f"the arena's control page has no room for {world_size} ranks")
        self._world_size = world_size
        self._writers = world_size if writers is None else writers
        self._next_place: dict[int, int] = {}

    def acknowledge(self, rank: int, direction: Direction, ticket: int) -> None:
        """Say, as `rank`, that its copies up to `ticket` have finished, well or not."""
        self._words[rank * self._part + _index(direction)] = ticket

    def acknowledged(self, direction: Direction) -> int:
        """Highest ticket whose copies, and those of all before it, no rank has still to do; 0 at first."""
        ranks = self._writers if direction == "store" else self._world_size
        index = _index(direction)
        return min(self._words[rank * self._part + index] for rank in range(ranks))

    def fail(self, rank: int, ticket: int) -> None:
        """Say, as `rank`, that the slots of store `ticket` do not hold what they should."""
        ring = self._part - _RING
        place = self._next_place.get(rank, 0)
        self._next_place[rank] = (place + 1) % ring
        start = rank * self._part
        self._words[start + _LOST] = max(self._words[start + _LOST], self._words[start + _RING + place])
        self._words[start + _RING + place] = ticket

    def failed(self, ticket: int) -> bool:
        """Whether some rank failed at store `ticket`; so count those too old for a full ring to know of."""
        for start in range(0, self._world_size * self._part, self._part):
            if ticket <= self._words[start + _LOST]:
                return True
            if ticket in self._words[start + _RING : start + self._part].tolist():
                return True
        return False

    def close(self) -> None:
        """Let go of the control page, which else keeps the arena mapped; nothing can be asked afterwards."""
        self._words.release()


def _index(direction: Direction) -> int:
    return 0 if direction == "store" else 1
