"""What the planner knows of one secondary tier."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import cached_property

from ..config import TierConfig
from ..engine.base import Verb
from ..health import Breaker
from ..ledger import Ledger
from ..metrics import TierCounters
from ..presence import Presence

__all__ = ["READS", "Direction", "Item", "Tally", "TierState"]

#: The verbs that bring something up; the others write.
READS = frozenset({Verb.PROBE, Verb.READ})

#: One unit of work: key, slot (-1 when nothing moves), payload length in bytes.
Item = tuple[bytes, int, int]


class Direction:
    """One direction of a tier: what waits, how much is in flight, and whether it is worth asking.

    Parameters
    ----------
    window : int
        Batches in flight at most.
    items : int
        Transfers in one batch at most.
    """

    def __init__(self, window: int, items: int = 1) -> None:
        self.window = window
        self.items = items
        self.in_flight = 0
        self.breaker = Breaker()
        self.queues: dict[Verb, deque[Item]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))


@dataclass
class Tally:
    """What this instance has done to a tier whose limits it shares with others.

    Attributes
    ----------
    instance : bytes
        Its name among them.
    lane : int
        Which of the engine's tiers it is whose worker collects.
    largest : int
        Bytes on storage of the largest chunk.
    created, created_bytes, deleted, deleted_bytes : int
        Objects, and their bytes on storage, so far.
    unsure : int
        Deletions, whose sizes are not known, and writes that may have failed.
    """

    instance: bytes
    lane: int
    largest: int
    created: int = 0
    created_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    unsure: int = 0

    def wrote(self, size: int) -> None:
        """This instance has created an object of `size` bytes."""
        self.created += 1
        self.created_bytes += size

    def may_have_written(self, size: int) -> None:
        """It may have created one, too, without learning so: rather too much is counted until a survey."""
        self.wrote(size)
        self.unsure += 1

    def erased(self, size: int) -> None:
        """This instance has deleted an object of about `size` bytes; 0 if there was one at all."""
        self.unsure += 1
        if size:
            self.deleted += 1
            self.deleted_bytes += size


@dataclass(eq=False)
class TierState:
    """State of one secondary tier, shared by the parts of the planner.

    Attributes
    ----------
    index : int
        Place among the secondary tiers, from 0.
    write_limit : int
        Host slots that waiting and running writes to this tier may hold.
    tally : Tally, optional
        Of a tier whose limits are shared; it has no ledger.
    upkeep : Direction
        Questions to the collector of such a tier.
    tombs : dict
        Keys under deletion, or hidden because they could not be deleted: neither read from nor written to the
        tier; the most recent last.
    writing : dict
        Key -> sequence number of its write, from the moment it is queued until the worker has answered.
    overdue : set of bytes
        Those of them that are past their deadline: failed for the caller, but the worker may still read the
        slot.
    owed : dict
        Keys in host memory that the tier still has to get, with the number of their commit, oldest first:
        with ``write=through`` those that found the queue of writes full, with ``write=on-evict`` all of them.
    last_error : str
        What went wrong with the storage most recently.
    address : str
        Of the peer that has this place, see :class:`~.select.Selector`; empty for none, and for other tiers.
    named : float
        When a request has last asked for the tier by name.
    expected : int
        Walks and promotions under way that name the tier, and may yet come to it.
    """

    index: int
    config: TierConfig
    write_limit: int
    reads: Direction
    writes: Direction
    presence: Presence = field(default_factory=Presence)
    counters: TierCounters = field(default_factory=TierCounters)
    ledger: Ledger | None = None
    tally: Tally | None = None
    upkeep: Direction = field(default_factory=lambda: Direction(1))
    tombs: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    writing: dict[bytes, int] = field(default_factory=dict)
    overdue: set[bytes] = field(default_factory=set)
    owed: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    last_error: str = ""
    address: str = ""
    named: float = float("-inf")
    expected: int = 0
    chunks: int = 0
    bytes: int = 0

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.config.name

    @cached_property
    def remote(self) -> bool:
        """Whether others see the tier."""
        return not self.config.is_near

    @cached_property
    def bulk(self) -> bool:
        """Whether one question about many keys costs no more than one about few."""
        return self.config.scheme == "peer"

    def direction(self, verb: Verb) -> Direction:
        """The direction that `verb` belongs to."""
        if verb is Verb.COLLECT:
            return self.upkeep
        return self.reads if verb in READS else self.writes

    def lane(self, verb: Verb) -> int:
        """Which of the engine's tiers serves `verb`."""
        return self.tally.lane if verb is Verb.COLLECT and self.tally is not None else self.index

    @cached_property
    def wave(self) -> int:
        """Reads that keep its workers busy until there are more."""
        return self.reads.items * self.config.workers

    def readable(self, now: float) -> bool:
        """Whether the tier may be asked for chunks at time `now`."""
        return self.config.read and not self.reads.breaker.blocked(now)

    def write_room(self) -> int:
        """How many more writes may be queued."""
        return self.write_limit - len(self.writing)
