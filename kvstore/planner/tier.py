"""What the planner knows of one secondary tier."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..config import TierConfig
from ..engine.base import Verb
from ..health import Breaker
from ..ledger import Ledger
from ..metrics import TierCounters
from ..presence import Presence

__all__ = ["READS", "Direction", "Item", "TierState"]

#: The verbs that bring something up; the others write.
READS = frozenset({Verb.PROBE, Verb.READ})

#: One unit of work: key, slot (-1 when nothing moves), payload length in bytes.
Item = tuple[bytes, int, int]


class Direction:
    """One direction of a tier: what waits, how much is in flight, and whether it is worth asking."""

    def __init__(self, window: int) -> None:
        self.window = window  # batches in flight at most
        self.in_flight = 0
        self.breaker = Breaker()
        self.queues: dict[Verb, deque[Item]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))


@dataclass(eq=False)
class TierState:
    """State of one secondary tier, shared by the parts of the planner.

    Attributes
    ----------
    index : int
        Place among the secondary tiers, from 0.
    slice_items : int
        Transfers in one batch at most.
    write_limit : int
        Host slots that waiting and running writes to this tier may hold.
    tombs : set of bytes
        Keys under deletion (or whose deletion failed): neither read from nor written to the tier.
    writing : dict
        Key -> sequence number of its write, from the moment it is queued until the worker has answered.
    overdue : set of bytes
        Those of them that are past their deadline: failed for the caller, but the worker may still read the
        slot.
    owed : dict
        Keys that a ``write=on-evict`` tier still has to get (a dict for its order).
    """

    index: int
    config: TierConfig
    slice_items: int
    write_limit: int
    reads: Direction
    writes: Direction
    presence: Presence = field(default_factory=Presence)
    counters: TierCounters = field(default_factory=TierCounters)
    ledger: Ledger | None = None
    tombs: set[bytes] = field(default_factory=set)
    writing: dict[bytes, int] = field(default_factory=dict)
    overdue: set[bytes] = field(default_factory=set)
    owed: dict[bytes, None] = field(default_factory=dict)
    chunks: int = 0
    bytes: int = 0

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.config.name

    @property
    def remote(self) -> bool:
        """Whether others see the tier."""
        return self.config.scheme not in ("file", "memory")

    def direction(self, verb: Verb) -> Direction:
        """The direction that `verb` belongs to."""
        return self.reads if verb in READS else self.writes

    def readable(self, now: float) -> bool:
        """Whether the tier may be asked for chunks at time `now`."""
        return self.config.read and not self.reads.breaker.blocked(now)

    def write_room(self) -> int:
        """How many more writes may be queued."""
        return self.write_limit - len(self.writing)
