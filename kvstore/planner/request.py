"""What somebody wants promoted, and how far that has come; :mod:`kvstore.planner.fetch` does it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from .tier import TierState

__all__ = ["Fetch"]


class Fetch:
    """One request for promotion.

    Parameters
    ----------
    keys : iterable of bytes
        Wanted, in order; repeated keys count once.
    hold : bool
        Lease every chunk as soon as it is resident; whoever asked reads it, and drops the leases.
    into : dict, optional
        Key -> slot of leases that somebody has. What becomes resident is leased and added, to be read later.

    Attributes
    ----------
    keys : list of bytes
        Each once, in order.
    tiers : sequence of TierState or None
        Those that may be asked, in order; None for the usual ones; once it is done, no more.
    promoted, missing, skipped : list of bytes
        Keys brought up; keys that no tier has; keys left alone: resident before, or no room.
    held : dict
        Key -> slot of the leases taken.
    """

    def __init__(
        self,
        keys: Iterable[bytes],
        *,
        hold: bool = False,
        into: dict[bytes, int] | None = None,
    ) -> None:
        self.tiers: Sequence[TierState] | None = None
        self.todo: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)
        self.keys = list(self.todo)
        self.coming: set[bytes] = set()
        self.promoted: list[bytes] = []
        self.missing: list[bytes] = []
        self.skipped: list[bytes] = []
        self.held: dict[bytes, int] = {} if into is None else into
        self.tried_again: set[bytes] = set()  # keys whose worker died with them
        self.asked = False  # every key of `todo` of which nothing was known is being asked for
        self.keep: set[bytes] = set()  # dealt with and resident: this fetch never evicts them
        self.ahead: set[bytes] = set()  # resident, but not come to yet: evicted only for keys before them
        self.hold = hold or into is not None
        self.reads = hold
        self.cancelled = False
        self._sorted = True
        self.on_done: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether every key has come to one of the three ends."""
        return not self.todo and not self.coming

    def come_back(self, key: bytes) -> None:
        """`key` has left ``todo`` and is to be dealt with again."""
        self.todo[key] = None
        self._sorted = False

    @cached_property
    def _places(self) -> dict[bytes, int]:
        """Key -> place in the request; few requests need it."""
        return {key: place for place, key in enumerate(self.keys)}

    def sort(self) -> None:
        """Bring ``todo`` into the order of the request."""
        if not self._sorted:
            self.todo = OrderedDict.fromkeys(sorted(self.todo, key=self._places.__getitem__))
            self._sorted = True
