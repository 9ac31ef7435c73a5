"""Circuit breaker of one tier and direction.

``closed``: everything passes. It opens when most of the recent operations failed, or when operations hang or
take their workers with them. ``open``: nothing passes until a jittered cool-down is over, which doubles from
one opening to the next. ``half-open``: one trial passes; its outcome closes or opens the breaker. No clock of
its own, no thread.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from enum import StrEnum
from itertools import repeat

__all__ = ["Breaker", "BreakerState"]

#: Recent operations that are judged, and how many there must be before a judgement.
_WINDOW, _ENOUGH = 32, 8
#: Share of failures that opens the breaker.
_FAILING = 0.5
#: Hangs or deaths in a row, of operations of one kind, that open it.
_HANGS = 2
#: No kind of operation.
_NOBODY = object()
#: Seconds of the first and of the longest cool-down.
_FIRST, _LONGEST = 1.0, 60.0


class BreakerState(StrEnum):
    """What a breaker lets pass: everything, nothing, or one trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Decides whether a tier is to be asked.

    Parameters
    ----------
    rng : random.Random, optional
        Source of the jitter (up to a quarter of the cool-down).
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._hangs: dict[Hashable, int] = {}
        self._cooldown = _FIRST
        self._until: float | None = None  # open until then; None while closed
        self._trial = False
        self._suspect: Hashable = _NOBODY  # kind whose hangs opened it, until one of that kind is answered
        self.openings = 0

    def state(self, now: float) -> BreakerState:
        """State at time `now` (seconds, any monotonic clock)."""
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def blocked(self, now: float) -> bool:
        """Whether it is pointless to queue anything at time `now`."""
        return self._until is not None and (self._trial or now < self._until)

    def admit(self, now: float) -> bool:
        """Whether an operation may start at time `now`; in half-open state the first to ask is the trial."""
        if self._until is None:
            return True
        if self.blocked(now):
            return False
        self._trial = True
        return True

    @property
    def on_trial(self) -> bool:
        """Whether the one operation of the half-open state is under way."""
        return self._trial

    def succeeded(self, kind: Hashable = None, times: int = 1) -> bool:
        """Operations of this `kind` were answered; True when this closed the breaker."""
        self._hangs.pop(kind, None)
        self._recent.extend(repeat(True, times))
        if self._suspect in (kind, _NOBODY):
            self._suspect = _NOBODY
            if self._until is None:
                self._cooldown = _FIRST
        if self._until is None or not self._trial:
            return False
        self._until, self._trial = None, False
        if self._suspect is _NOBODY:
            self._cooldown = _FIRST
        self._recent.clear()
        self._hangs.clear()
        return True

    def failed(self, now: float, kind: Hashable = None, *, hang: bool = False) -> bool:
        """An operation of this `kind` failed, or hung; True when this opened the breaker.

        Hangs count by kind: a tier whose reads hang is down, however promptly it answers probes. When such
        an answer has closed the breaker, the first further hang of the suspected kind opens it again, for
        twice as long.
        """
        self._recent.append(False)
        if hang:
            self._hangs[kind] = self._hangs.get(kind, 0) + 1
        if self._until is not None:
            if self._trial:
                self._open(now)
            return False
        if hang and (kind == self._suspect or self._hangs[kind] >= _HANGS):
            if kind == self._suspect:
                self._lengthen()
            self._suspect = kind
            self._open(now)
            return True
        failures = self._recent.count(False)
        if len(self._recent) >= _ENOUGH and failures >= _FAILING * len(self._recent):
            self._open(now)
            return True
        return False

    def trip(self, now: float) -> None:
        """Open at once: the tier could not be reached."""
        self._open(now)

    def _open(self, now: float) -> None:
        if self._until is not None:
            self._lengthen()
        self._until = now + self._cooldown * (1 + self._rng.random() / 4)
        self._trial = False
        self._hangs.clear()
        self._recent.clear()
        self.openings += 1

    def _lengthen(self) -> None:
        self._cooldown = min(_LONGEST, 2 * self._cooldown)
