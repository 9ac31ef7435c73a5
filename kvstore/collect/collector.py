"""The collector of one namespace in a directory, as one worker of each instance runs it.

Who owns what: a worker calls :meth:`Collector.turn` again and again, each time with its store's report, and
nobody else touches the object. Of all collectors of a namespace one at a time has ``accounting/collector``
locked; it keeps that lock from turn to turn until it has nothing left to do. The books are locked for moments
only, before and after the work of a turn.

A turn:

1. Enter the report into the books. Is there anything to do: no survey yet, too much, something expired?
2. If so, and nobody else is at it: survey the directory, or delete what was used least recently, for as long
   as a turn may last. An object that was used since the survey stays.
3. Enter what was deleted, and grant what fits. Nothing is granted that does not fit, whoever collects: a
   collector that is stuck costs stores, never space.
"""

# ruff: noqa: PTH116 - system calls by their names

from __future__ import annotations

import copy
import os
import time
from typing import TYPE_CHECKING

from ..backends.layout import object_name
from .accounting import Accounts, Books, Turnover
from .limits import Free, Limits, is_shared
from .lock import FileLock
from .report import Answer, Report, Row
from .survey import MOST_VICTIMS, Survey

if TYPE_CHECKING:
    from ..backends import Backend
    from ..config import TierConfig
    from ..namespace import Namespace

__all__ = ["LOCK", "Collector", "collector_of"]

LOCK = "collector"
"""Name of the lock that the one who collects holds."""
#: Longest turn, in seconds, and the part of a tier's timeout that it may take.
_TURN, _PART = 0.05, 0.25
#: Seconds from one survey to the next that doubts alone can give rise to.
_PATIENCE = 30.0
#: Objects that are deleted between two looks at the clock.
_STRIDE = 32


def collector_of(tier: TierConfig, namespace: Namespace, backend: Backend) -> Collector | None:
    """The collector of `tier` for one namespace; None when its instances share no limits."""
    if not is_shared(tier):
        return None
    return Collector(
        backend,
        f"{tier.path.rstrip('/')}/{namespace.directory}",
        Limits.of(tier, namespace.chunk_size),
        mode=tier.mode,
        seconds=min(_TURN, tier.timeout * _PART),
    )


class Collector:
    """Keeps one namespace within its limits, together with the collectors of other instances.

    Parameters
    ----------
    backend : Backend
        Open; it lists and deletes.
    path : str
        Directory of the namespace.
    limits : Limits
    mode : int
        Permission bits of the files of the books.
    seconds : float
        How long a turn may work.
    most : int
        Objects that a survey remembers.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        limits: Limits,
        *,
        mode: int = 0o600,
        seconds: float = _TURN,
        most: int = MOST_VICTIMS,
    ) -> None:
        self._backend = backend
        self._path = path
        self._limits = limits
        self._seconds = seconds
        self._most = most
        self._books = Books(path, mode, patience=seconds)
        self._lock = self._books.lock(LOCK)
        self._members: dict[bytes, FileLock] = {}  # of the instances that report here
        self._survey: Survey | None = None
        self._since = Turnover()
        self._surveyed = 0.0
        self._victims: list[tuple[float, int, bytes]] = []  # the oldest last
        self._fruitless = False
        self._patient_until = 0.0  # doubts are no reason for another survey until then

    def turn(self, report: Report) -> Answer:
        """Take in `report`, work for a while if there is work, and answer.

        Raises
        ------
        OSError
            Books or objects cannot be read or written; what has been done is in the books.
        """
        until = time.monotonic() + self._seconds
        with self._books.edit() as accounts:
            self._join(report, accounts)
            if report.leaving:
                self._leave(report, accounts)
                return Answer(0, accounts.size, accounts.chunks, more=False)
            if accounts.counted and not report.work:
                return self._answer(accounts, report, [], more=self._lock.held)
            if not self._work(accounts, report):
                self._rest()
                return self._answer(accounts, report, [], more=False)
        if not self._lock.acquire():
            with self._books.edit() as accounts:
                return self._answer(accounts, report, [], more=False)
        removed: list[Row] = []
        try:
            self._go_on(report, until, removed)
        finally:
            with self._books.edit() as accounts:
                accounts.removed(len(removed), sum(size for _, size, _ in removed))
                accounts.deleting = False
                more = self._work(accounts, report) and not self._fruitless
                if not more:
                    self._rest()
                answer = self._answer(accounts, report, removed, more=more)
        return answer

    def close(self) -> None:
        """Let go of every lock."""
        self._rest()
        for member in self._members.values():
            member.release()

    # What there is to do.

    def _work(self, accounts: Accounts, report: Report) -> bool:
        if not accounts.counted or self._survey is not None:
            return True
        return self._excess(accounts, report) > 0 or self._expired_before() > accounts.oldest

    def _excess(self, accounts: Accounts, report: Report) -> int:
        free = Free.at(self._path)
        excess = self._limits.excess(accounts.size, accounts.claimed, report.needed, free, accounts.average)
        if excess and not self._lock.held:
            self._books.bury_the_dead(accounts, time.time())
        return excess

    def _expired_before(self) -> float:
        """Objects last used before this time have expired."""
        return self._books.now() - self._limits.ttl if self._limits.ttl is not None else float("-inf")

    def _go_on(self, report: Report, until: float, removed: list[Row]) -> None:
        """Survey, if that has to be done first; then delete."""
        self._fruitless = False
        with self._books.edit() as accounts:
            excess = self._excess(accounts, report)
            expired = self._expired_before()
            doubt = accounts.doubtful and excess > 0 and time.monotonic() >= self._patient_until
            if self._survey is None and (
                not self._victims or not accounts.counted or accounts.deleting or doubt
            ):
                self._begin_survey(accounts)
            accounts.deleting = True
        if self._survey is not None:
            if not self._advance_survey(self._survey, until):
                return
            with self._books.edit() as accounts:
                accounts.reconcile(self._survey.chunks, self._survey.size, self._since)
                self._victims = self._survey.oldest.take()
                excess = self._excess(accounts, report)
            self._fruitless = not self._victims
            self._patient_until = time.monotonic() + _PATIENCE
            self._survey = None
        self._delete(excess, expired, until, removed)
        if self._limits.ttl is not None:
            self._note_oldest()

    def _begin_survey(self, accounts: Accounts) -> None:
        self._since = copy.copy(accounts.turnover)
        self._surveyed = self._books.now()
        self._survey = Survey(self._backend.scan(), self._most)

    def _advance_survey(self, survey: Survey, until: float) -> bool:
        try:
            return survey.advance(until)
        except BaseException:
            self._survey = None
            with self._books.edit() as accounts:  # what could not be seen is not counted
                accounts.counted, accounts.doubtful = True, True
            raise

    # Deletion.

    def _delete(self, excess: int, expired: float, until: float, removed: list[Row]) -> None:
        """Delete the oldest, while there is too much or they have expired."""
        while self._victims and time.monotonic() < until:
            batch: list[Row] = []
            while self._victims and len(batch) < _STRIDE:
                mtime, size, key = self._victims[-1]
                if excess <= 0 and mtime >= expired:
                    break
                self._victims.pop()
                if self._is_unused_since(key, mtime):
                    batch.append((key, size, mtime))
                    excess -= size
            if not batch:
                return
            self._delete_batch(batch, removed)

    def _is_unused_since(self, key: bytes, mtime: float) -> bool:
        try:
            return os.stat(f"{self._path}/{object_name(key)}").st_mtime <= mtime
        except FileNotFoundError:
            return False  # whoever deleted it may have told the books; if not, the next survey does

    def _delete_batch(self, batch: list[Row], removed: list[Row]) -> None:
        try:
            self._backend.delete([key for key, _, _ in batch])
        except OSError:
            self._delete_singly(batch, removed)
        else:
            removed += batch

    def _delete_singly(self, batch: list[Row], removed: list[Row]) -> None:
        """One of them cannot be deleted: the others can."""
        last: OSError | None = None
        before = len(removed)
        for row in batch:
            try:
                self._backend.delete([row[0]])
            except OSError as error:
                last = error
            else:
                removed.append(row)
        if last is not None and len(removed) == before:
            raise last

    def _note_oldest(self) -> None:
        with self._books.edit() as accounts:
            accounts.oldest = self._victims[-1][0] if self._victims else self._surveyed

    # Books.

    def _answer(self, accounts: Accounts, report: Report, removed: list[Row], *, more: bool) -> Answer:
        """Grant what is expected soon, below the high watermark; above it, what waits."""
        room = 0
        if accounts.counted:
            room = self._limits.room(accounts.size, accounts.claimed, Free.at(self._path))
        granted = min(report.wanted, max(room - self._limits.step, min(report.needed, room)))
        if granted < report.least:
            granted = 0
        accounts.members[report.instance.hex()].claimed += granted
        return Answer(granted, accounts.size, accounts.chunks, more, removed)

    def _join(self, report: Report, accounts: Accounts) -> None:
        member = self._members.get(report.instance)
        if member is None:
            member = self._members[report.instance] = self._books.member_lock(report.instance.hex())
        member.acquire()
        accounts.enter(report)

    def _leave(self, report: Report, accounts: Accounts) -> None:
        self._rest()
        self._members.pop(report.instance).remove()
        del accounts.members[report.instance.hex()]

    def _rest(self) -> None:
        """There is nothing to do: let others collect."""
        self._survey = None
        self._lock.release()
