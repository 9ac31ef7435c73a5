"""One go at a fetch within a turn of :mod:`~kvstore.planner.fetch`: what it may use, and how it ends."""

from __future__ import annotations

from enum import Enum

from .request import Fetch
from .tier import Item, TierState

__all__ = ["Run", "Step"]


class Step(Enum):
    """What to do after one key of a fetch: go on, or wait, for an answer, for room, or for the next turn."""

    NEXT = 0
    WAIT = 1
    BLOCKED = 2
    REST = 3


class Run:
    """One go at a fetch, within a turn.

    Parameters
    ----------
    fetch : Fetch
    now : float
    may_evict : bool
    tiers : list of TierState
        Those that may be asked.

    Attributes
    ----------
    room : int
        Slots that are known to be free for it, within the budget.
    brought : int
        Chunks that it has given slots.
    loads : dict
        Index of a tier -> what to bring up from it.
    """

    __slots__ = ("brought", "fetch", "loads", "may_evict", "now", "room", "tiers")

    def __init__(self, fetch: Fetch, now: float, may_evict: bool, tiers: list[TierState]) -> None:
        self.fetch = fetch
        self.now = now
        self.may_evict = may_evict
        self.tiers = tiers
        self.room = 0
        self.brought = 0
        self.loads: dict[int, list[Item]] = {}
