"""What is stored at all: chunks that have been offered often enough."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Threshold"]


class Threshold:
    """Lets a chunk pass once it has been offered so many times.

    Parameters
    ----------
    offers : int
        Below 2, everything passes.
    most : int
        Keys whose offers are counted; the least recently offered are forgotten first.
    """

    def __init__(self, offers: int, most: int) -> None:
        self._offers = offers
        self._most = max(1, most)
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    @property
    def active(self) -> bool:
        """Whether anything can be refused."""
        return self._offers >= 2

    def admit(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that pass if they are offered now, in order."""
        counts, others = self._counts, self._offers - 1
        return [key for key in keys if counts.get(key, 0) >= others]

    def count(self, keys: Sequence[bytes]) -> None:
        """Each of `keys` has been offered."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.pop(key, 0) + 1
        while len(counts) > self._most:
            counts.popitem(last=False)
