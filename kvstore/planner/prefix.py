"""What was stored before, and without which what comes next is worth nothing."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Prefix"]


class Prefix:
    """The chunks before those that :meth:`Store.reserve` is asked for, for a caller who asks again and again.

    The store keeps in it what no tier has got yet, and so looks at no more than that the next time.

    Parameters
    ----------
    keys : iterable of bytes
        What was stored before.
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.unsaved = list(keys)
        self._room: int | None = None
        self._eased = 0

    def extend(self, keys: Iterable[bytes]) -> None:
        """These have been stored since."""
        self.unsaved.extend(keys)

    def wait(self, room: int, eased: int) -> None:
        """There was `room` beside it, and not enough, when the planner's count of what makes room was
        `eased`."""
        self._room, self._eased = room, eased

    def waits(self, slots: int, eased: int) -> bool:
        """Whether what has happened since cannot have made room for `slots`."""
        return self._room is not None and slots > self._room + eased - self._eased
