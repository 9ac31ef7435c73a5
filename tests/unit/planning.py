"""A planner without store, engine or storage: the test is the clock and the workers."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.catalog import Catalog
from kvstore.collect.limits import is_shared
from kvstore.config import TierConfig
from kvstore.engine.base import Batch, Completion, Result, Status, Verb
from kvstore.events import Event, EventQueue
from kvstore.frame import object_size
from kvstore.ledger import Ledger
from kvstore.planner import Direction, Fetch, Planner, Tally, TierState
from kvstore.policy import make_policy
from support.chunks import CHUNK

__all__ = ["OK", "Desk", "failed"]

OK = Result(Status.OK, CHUNK)


def failed(status: Status = Status.FAILED) -> Result:
    """A result that is no success."""
    return Result(status, error="it failed")


class Desk:
    """Where a test plays store and workers.

    Parameters
    ----------
    *tiers : TierConfig
    slots : int
        Of the host.
    slice_items : int
        Transfers in one batch at most.

    Attributes
    ----------
    batches : list of Batch
        Sent to workers and not answered, oldest first.
    abandoned : list of Batch
    now : float
        The time.
    """

    def __init__(self, *tiers: TierConfig, slots: int = 4, slice_items: int = 8) -> None:
        self.tiers = [
            TierState(
                index=i,
                config=tier,
                write_limit=slots,
                reads=Direction(2 * tier.workers, slice_items),
                writes=Direction(2 * tier.workers, slice_items),
                ledger=Ledger(tier.capacity) if tier.capacity and not is_shared(tier) else None,
                tally=Tally(b"a desk--", len(tiers) + i, object_size(CHUNK)) if is_shared(tier) else None,
            )
            for i, tier in enumerate(tiers)
        ]
        self.catalog = Catalog(slots, make_policy("lru", slots))
        self.queue = EventQueue()
        budget = max(1, slots // 2)
        self.planner = Planner(self.tiers, self.catalog, self.queue, host="host", budget=budget)
        self.now = 0.0
        self.batches: list[Batch] = []
        self.abandoned: list[Batch] = []

    def advance(self, seconds: float = 0.0, *, may_evict: bool = True) -> list[Batch]:
        """Let time pass and do what is due; returns the new batches."""
        self.now += seconds
        self.planner.advance(self.now, may_evict=may_evict)
        new = self.planner.take_outbox()
        self.batches += new
        self.abandoned += self.planner.take_abandoned()
        return new

    def answer(self, batch: Batch, *results: Result, first: int = 0) -> list[Batch]:
        """Answer items of `batch`, one result for each, or one for all; returns the new batches."""
        given = list(results) if len(results) > 1 or first else list(results) * len(batch.keys)
        self.planner.apply(Completion(batch.id, first, given, [], {}), self.now)
        if first + len(given) == len(batch.keys) and batch in self.batches:
            self.batches.remove(batch)
        return self.advance()

    def batch(self, verb: Verb, tier: int = 0) -> Batch:
        """The oldest batch of `verb` that workers have."""
        return next(batch for batch in self.batches if batch.verb is verb and batch.tier == tier)

    def store(self, *keys: bytes) -> None:
        """Store chunks as a caller does."""
        slots = self.planner.reserve(keys, self.now, lossless=False)
        assert list(slots) == list(keys)
        self.planner.commit([(key, slot, CHUNK) for key, slot in slots.items()], self.now)
        self.advance()

    def fetch(self, *keys: bytes, hold: bool = False) -> Fetch:
        """Ask for promotion."""
        fetch = Fetch(keys, hold=hold)
        self.planner.fetch(fetch, self.now)
        self.advance()
        return fetch

    def found(self, *keys: bytes, tier: int = 0) -> None:
        """Make `keys` known to be in a tier."""
        for key in keys:
            self.tiers[tier].presence.found(key, self.now)

    def events(self) -> list[Event]:
        """Events since the last call."""
        return list(self.queue.take())

    def asked(self, verb: Verb) -> list[Sequence[bytes]]:
        """Keys of the batches of `verb` that workers have."""
        return [batch.keys for batch in self.batches if batch.verb is verb]
