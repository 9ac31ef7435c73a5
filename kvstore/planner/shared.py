"""Limits of a shared tier as one instance keeps to them: writes wait for a grant of the collector.

The gate asks the tier's collector (a COLLECT; see :mod:`kvstore.collect`) for bytes, passes writes on while
they last, and reports what has been created. Writes that wait in vain are dropped: somebody else may be
making room, or be stuck at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..collect.limits import GRANT_SECONDS
from ..collect.report import Answer, Report, Row
from ..engine.base import Result, Status
from ..frame import object_size
from .tier import Item, Tally, TierState

__all__ = ["Outlet", "SharedGate"]

#: Seconds from one question to the next: while nothing else happens, after a write, when nothing was granted.
_USUALLY, _AFTER_A_WRITE, _AFTER_A_REFUSAL = 1.0, 0.2, 0.03
#: How much longer these are on object storage, where every question is a few requests.
_REMOTE = 5.0
#: How much longer than it has worked a collector rests that no write waits for.
_REST = 9.0
#: Seconds for which writes wait for room.
_PATIENCE = 2.0
#: Objects for which a busy instance has a grant in hand, and the share of a capacity that this may be.
_AHEAD, _SHARE = 512, 160


class Outlet(Protocol):
    """Where a gate sends things.

    `on_dropped` takes a write for which there is no room, `on_collected` what the collector has deleted.
    """

    on_dropped: Callable[[TierState, Item], None]
    on_collected: Callable[[TierState, Sequence[bytes], float], None]

    def release(self, item: Item, tier: TierState) -> None:
        """Pass a write on to the workers."""

    def ask(self, tier: TierState, report: Report) -> None:
        """Send a report to the collector."""


class SharedGate:
    """Writes to one shared tier that wait for a grant."""

    def __init__(self, outlet: Outlet, tier: TierState, tally: Tally) -> None:
        self.tier = tier
        self.held: deque[Item] = deque()
        self.rows: list[Row] = []
        self.due = 0.0
        self._work_due = 0.0  # a collector rests until then, unless writes wait or are dropped
        self._outlet = outlet
        self._tally = tally
        self._scale = _REMOTE if tier.remote else 1.0
        self._asked_at = self._heard = 0.0  # the last question, and the last one that was answered
        self._grant = 0  # bytes that may be passed on
        self._expected = 0  # bytes that were passed on and have not ended
        self._sent: Report | None = None  # the last report
        self._asking = False
        self._more = False
        self._refused_since: float | None = None
        self._shut = False
        self._leaving = False
        self._left = False

    @property
    def busy(self) -> bool:
        """Whether the collector has to be asked even if nothing else happens."""
        return not self._left and bool(self.held or self._more or self._grant or self._is_news())

    def open(self, now: float) -> None:
        """Let writes pass while they are granted; drop what has no hope."""
        if self.tier.remote and now - self._heard > GRANT_SECONDS:
            self._grant = 0  # this process was stopped: the others may count it among the dead
        down = self.tier.writes.breaker.blocked(now) or self.tier.upkeep.breaker.blocked(now)
        while self.held:
            size = object_size(self.held[0][2])
            if size <= self._grant:
                self._grant -= size
                self._expected += size
                self._outlet.release(self.held.popleft(), self.tier)
            elif down or self._shut:
                self._outlet.on_dropped(self.tier, self.held.popleft())
            else:
                if self._refused_since is None:  # else it is asked again after a pause
                    self.due = now
                return

    def ended(self, size: int, now: float) -> None:
        """Writes that were passed on have ended, well or not."""
        self._expected -= size
        self.due = min(self.due, now + _AFTER_A_WRITE * self._scale)
        if self._grant < self._ahead() // 2:
            self.due = now
        self.open(now)

    def taken_back(self, size: int) -> None:
        """A write that was passed on will not happen."""
        self._expected -= size
        self._grant += size

    def advance(self, now: float) -> None:
        """Ask the collector, if it is time."""
        if self._asking or self._left or now < self.due:
            return
        self._sent = self._report()._replace(
            work=now >= self._work_due or self._shut or self._refused_since is not None
        )
        self._asking, self._asked_at = True, now
        self.due = now + _USUALLY * self._scale
        self._outlet.ask(self.tier, self._sent)

    def leave(self, now: float) -> bool:
        """Make the last report; True once it has been taken in, or will not be."""
        if self._sent is None or self._left or self.tier.upkeep.breaker.blocked(now):
            return True
        self._leaving = True
        if not self._asking:
            self.due = now
        return False

    def done(self, result: Result, now: float) -> None:
        """The collector has answered, or has not."""
        assert self._sent is not None
        rows, self.rows = self.rows, []
        self._asking = False
        self._left = self._sent.leaving
        granted, self._more = 0, False
        if result.status is Status.OK:
            answer = Answer.of(result.value, rows)
            granted, self._more = answer.granted, answer.more
            self._heard = self._asked_at
            self._take_over(answer, now)
        self._grant += granted
        if self._sent.work:
            self._work_due = now + _REST * result.seconds
        self._settle(granted > 0, now)
        self.due = now + self._pause(granted > 0, now, result.seconds)
        self.open(now)

    def _report(self) -> Report:
        """What there is to tell; a grant that nobody uses is given back."""
        tally, held = self._tally, [object_size(item[2]) for item in self.held]
        if not (held or self._expected or self._is_news()) or self._refused_since is not None:
            self._grant = 0
        active = bool(held or self._expected or self._is_news()) and not self._leaving
        if self._shut:
            held = [tally.largest]  # enough to begin again
        needed = max(0, sum(held) - self._grant)
        return Report(
            tally.instance,
            tally.created,
            tally.created_bytes,
            tally.deleted,
            tally.deleted_bytes,
            tally.unsure,
            claimed=self._grant + self._expected,
            least=max(0, held[0] - self._grant) if held else 0,
            needed=needed,
            wanted=needed + max(0, self._ahead() - self._grant) if active else needed,
            leaving=self._leaving and not self.held and not self._expected,
        )

    def _is_news(self) -> bool:
        """Whether something was created or deleted since the last report."""
        tally, sent = self._tally, self._sent
        return (tally.created, tally.unsure) != ((sent.created, sent.unsure) if sent else (0, 0))

    def _ahead(self) -> int:
        """Bytes to have in hand while writes go on."""
        objects = _AHEAD * self._tally.largest
        most = self.tier.config.most
        return objects if most is None else min(objects, most // _SHARE)

    def _take_over(self, answer: Answer, now: float) -> None:
        tally, sent = self._tally, self._sent
        assert sent is not None
        created, deleted = tally.created - sent.created, tally.deleted - sent.deleted
        self.tier.chunks = max(0, answer.chunks + created - deleted)
        self.tier.bytes = max(
            0,
            answer.size + tally.created_bytes - sent.created_bytes + sent.deleted_bytes - tally.deleted_bytes,
        )
        if answer.removed:
            self._outlet.on_collected(self.tier, [key for key, _, _ in answer.removed], now)

    def _settle(self, granted: bool, now: float) -> None:
        """How long have writes been waiting in vain?"""
        if granted or not self.held:
            self._refused_since = None
            self._shut = self._shut and not granted
        elif self._more:
            self._refused_since = now  # not in vain
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since >= min(_PATIENCE, self.tier.config.timeout):
            self._shut = True

    def _pause(self, granted: bool, now: float, seconds: float) -> float:
        """How long to wait until the next question, when the last one took `seconds`."""
        if self._leaving:
            return 0.0
        if self._more:
            return 0.0 if self.held or self._shut else max(0.0, self._work_due - now)
        # Where many change the same object, an answer takes long: then all ask less often.
        patience = seconds if self.tier.remote else 0.0
        if self.held:
            return patience if granted else max(patience, _AFTER_A_REFUSAL * self._scale)
        return max(patience, self._scale * (_AFTER_A_WRITE if self.busy or self._shut else _USUALLY))
