"""The part of one namespace in the total of its root.

While there is room, a namespace gets a larger share for the asking, which is a change of the root's books
and one of its own. When there is none left, one collector of all namespaces at a time, who has the lead in
the root, makes room (:mod:`kvstore.collect.clearance`), a while in each turn; the others' writes wait, and
are dropped in the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from .accounting import Accounts, Share
from .books import Books
from .clearance import Clearance
from .limits import Free, Limits
from .places import Root
from .report import Row
from .shares import enter_share, new_stamp, raise_share
from .survey import MOST_VICTIMS

__all__ = ["Total"]

#: Seconds after which somebody looks again whether room has to be made for which nobody waits.
_CALM = 5.0


class Total:
    """What a collector needs of its root.

    Parameters
    ----------
    root : Root
        Closed with it.
    directory : str
        Name of the namespace.
    limits : Limits
        Those of the root: its `capacity` is the total.
    most : int
        Objects that a survey of all namespaces remembers.
    """

    def __init__(self, root: Root, directory: str, limits: Limits, *, most: int = MOST_VICTIMS) -> None:
        self._root = root
        self._directory = directory
        self._limits = limits
        self._books = root.books()
        self._clearance = Clearance(root, self._books, limits, directory, most)
        self._steps: Iterator[None] | None = None
        self._short = False  # by the books of the root, as they were last looked at
        self._high: bool | None = None
        self._calm_until = 0.0

    def extend(self, books: Books, old: Share, needed: int, wanted: int) -> bool:
        """Raise the share of the namespace, which is `old` in its `books`, to `wanted` bytes, or at least to
        `needed`; True when it has become larger.

        Raises
        ------
        OSError
            Books cannot be read or changed.
        """
        new = self._books.change(partial(self._raise, old, needed, wanted, new_stamp()))
        return new != old and books.change(partial(enter_share, old, new))

    def _raise(self, old: Share, needed: int, wanted: int, stamp: str, root: Accounts) -> Share:
        new = old
        if root.counted:
            new = raise_share(self._directory, old, needed, wanted, stamp, self._limits, root)
        self._judge(root, max(0, needed - new.size))
        return new

    @property
    def busy(self) -> bool:
        """Whether room is being made here, and others have to wait."""
        return self._steps is not None

    def is_over(self) -> bool:
        """Whether room has to be made: because somebody waits for it, or ahead of that."""
        if self._high is None:
            self._judge(self._books.read() or Accounts(), 0)
        return self.busy or self._short or (bool(self._high) and time.monotonic() >= self._calm_until)

    def is_tight(self) -> bool:
        """Whether there is so little room that somebody else may be waiting for some."""
        self._judge(self._books.read() or Accounts(), 0)
        return bool(self._high)

    def _judge(self, root: Accounts, needed: int) -> None:
        self._short = not root.counted or needed > self._limits.room(root.shared_out, 0, Free.endless())
        self._high = root.shared_out > self._limits.high

    def make_room(self, needed: int, until: float) -> tuple[list[Row], bool]:
        """Make room for `needed` bytes more, until `until` (by ``time.monotonic``), unless somebody else is
        at it.

        Returns
        -------
        removed : list of Row
            What was deleted in this namespace.
        more : bool
            Whether there is more to do.

        Raises
        ------
        OSError
            Books or objects cannot be read or written; what has been done is in the books.
        """
        self._short, self._high = False, None
        if not self._books.take_lead():
            self._forget()
            return [], False
        if self._steps is None:
            self._steps = self._clearance.steps(needed)
        try:
            for _ in self._steps:
                if time.monotonic() >= until:
                    return self._clearance.take_removed(), True
        except BaseException:
            self.rest()
            raise
        self.rest()
        return self._clearance.take_removed(), False

    def rest(self) -> None:
        """Let others make room."""
        if self._steps is not None:
            self._forget()
            self._calm_until = time.monotonic() + _CALM
            with suppress(OSError):  # then the lead runs out
                self._books.change(self._books.lay_down)

    def _forget(self) -> None:
        self._steps = None
        self._clearance.stop()

    def close(self) -> None:
        """Let go of the lead, and of the books."""
        self._forget()
        self._books.close()
        self._root.close()
