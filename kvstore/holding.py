"""What callers hold of a store, and how it comes back whatever becomes of the caller.

A hold ends when its :class:`Holding` is given back, or when nobody has that any more: an exception, such as
Ctrl-C, can come before the ``with`` block that would have ended it. What is given back only waits in a deque,
which no signal can interrupt, for the next turn of the store.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

__all__ = ["Hold", "Holding", "Holds"]


class Holding:
    """Something of a store's that a caller has, until the end of a ``with`` block.

    Parameters
    ----------
    holds : Holds
        The store's books; the store's lock is held.
    settle : callable
        Has the store take back what was returned.
    end : callable
        ``end(what)`` takes it back; called with the lock held.
    what
    """

    def __init__(
        self, holds: Holds, settle: Callable[[], None], end: Callable[[Any], None], what: Any
    ) -> None:
        self._holds = holds
        self._settle = settle
        self._hold: Hold | None = Hold(self, holds.returned.append)
        self._hold.end, self._hold.what = end, what
        holds.out.add(self._hold)

    @property
    def ended(self) -> bool:
        """Whether it is the caller's no longer."""
        return self._hold is None

    def give_back(self) -> None:
        """Give it back; a second call does nothing."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._holds.returned.append(hold)
            self._settle()

    def resolve(self) -> None:
        """There is nothing to give back any more; the store's lock is held."""
        if self._hold is not None:
            self._holds.out.discard(self._hold)
            self._hold = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


class Hold(weakref.ref[Holding]):
    """What the store remembers of a :class:`Holding`.

    When that goes, the interpreter puts this among what was returned. (A ``__del__`` would do so in Python,
    and swallow a Ctrl-C that comes meanwhile.)
    """

    __slots__ = ("end", "what")

    end: Callable[[Any], None]
    what: Any


class Holds:
    """The books on what callers hold.

    Attributes
    ----------
    out : set of Hold
        What somebody has; the store's lock is held.
    returned : deque of Hold
        Nobody has these any more; any thread may append to it at any time.
    """

    def __init__(self) -> None:
        self.returned: deque[Hold] = deque()
        self.out: set[Hold] = set()

    def take_back(self) -> None:
        """End every hold that was returned, once."""
        while self.returned:
            hold = self.returned.popleft()
            if hold in self.out:
                self.out.remove(hold)
                hold.end(hold.what)
