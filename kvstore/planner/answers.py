"""What workers say of items of a batch, in columns: the caller's thread goes through all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from ..engine.base import Batch, Result, Status
from .tier import Item

__all__ = ["Answers"]

_OK = Status.OK


class Answers:
    """Items that have ended, at least one, and how.

    Parameters
    ----------
    keys, slots, lengths : sequence
        Those of the items.
    results : sequence of Result
        One for each.

    Attributes
    ----------
    statuses, values, seconds : tuple
        The parts of the results.
    """

    __slots__ = ("keys", "lengths", "results", "seconds", "slots", "statuses", "values")

    def __init__(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        lengths: Sequence[int],
        results: Sequence[Result],
    ) -> None:
        self.keys = keys
        self.slots = slots
        self.lengths = lengths
        self.results = results
        self.statuses, self.values, self.seconds, _ = zip(*results, strict=True)

    @classmethod
    def of(cls, batch: Batch, first: int, results: Sequence[Result]) -> Answers:
        """The `results` of the items of `batch` from index `first` on."""
        last = first + len(results)
        return cls(batch.keys[first:last], batch.slots[first:last], batch.lengths[first:last], results)

    @classmethod
    def alike(cls, items: Iterable[Item], result: Result) -> Answers:
        """The same `result` for each of `items`."""
        keys, slots, lengths = zip(*items, strict=True)
        return cls(keys, slots, lengths, [result] * len(keys))

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[Item, Result]]:
        """Each item with its result."""
        return zip(zip(self.keys, self.slots, self.lengths, strict=True), self.results, strict=True)

    @property
    def good(self) -> Answers | None:
        """Those that are OK; None when there are none."""
        good = self.statuses.count(_OK)
        if good == len(self):
            return self
        return self.where([status is _OK for status in self.statuses]) if good else None

    def where(self, wanted: Sequence[bool]) -> Answers:
        """Those in whose place `wanted` is true."""
        return Answers(
            list(compress(self.keys, wanted)),
            list(compress(self.slots, wanted)),
            list(compress(self.lengths, wanted)),
            list(compress(self.results, wanted)),
        )
