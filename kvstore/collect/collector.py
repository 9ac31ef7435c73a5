"""The collector of one namespace, as one worker of each instance runs it.

Who owns what: a worker calls :meth:`Collector.turn` again and again, each time with its store's report, and
nobody else touches the object. Of all collectors of a namespace one at a time has the lead; it keeps it from
turn to turn until it has nothing left to do. The accounts change in moments, before and after the work of a
turn.

A turn:

1. Enter the report into the accounts. Is there anything to do: no survey yet, too much, something expired?
2. If so, and nobody else is at it: survey the namespace, or delete what was used least recently, for as long
   as a turn may last. An object that was used since the survey stays.
3. Enter what was deleted, and grant what fits. Nothing is granted that does not fit, whoever collects: a
   collector that is stuck costs stores, never space.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import TYPE_CHECKING

from ..backends import BackendContext, connect
from ..backends.files import FileBackend
from .accounting import Accounts, Turnover
from .limits import SHARED, Limits, is_shared
from .report import Answer, Report, Row
from .survey import MOST_VICTIMS, Survey

if TYPE_CHECKING:
    from ..backends import Backend
    from ..config import TierConfig
    from ..namespace import Namespace
    from .books import Books

__all__ = ["Collector", "books_of", "collector_of"]

#: Share of a tier's timeout for which a turn may work, or wait for the accounts.
_PART = 0.25
#: Seconds from one survey to the next that doubts alone can give rise to.
_PATIENCE = 30.0


def books_of(tier: TierConfig, directory: str) -> Books | None:
    """The books of the namespace `directory` in `tier`; None on storage where none can be kept."""
    if tier.scheme == "file":
        from .directory import DirectoryBooks

        path = f"{tier.path.rstrip('/')}/{directory}"
        return DirectoryBooks(path, tier.mode, patience=tier.timeout * _PART)
    if tier.scheme in SHARED:
        context = BackendContext(bytes(16), b"", 0)  # of no chunk: only its small objects are asked for
        return _bucket_books(tier, connect(tier, context, directory))
    return None


def _bucket_books(tier: TierConfig, backend: FileBackend) -> Books:
    """Books that use the client of `backend`."""
    from ..backends.s3 import S3Backend
    from .bucket import BucketBooks

    assert isinstance(backend, S3Backend)
    return BucketBooks(backend.versioned(), timeout=tier.timeout, patience=tier.timeout * _PART)


def collector_of(tier: TierConfig, namespace: Namespace, backend: Backend) -> Collector | None:
    """The collector of `tier` for one namespace; None when its instances share no limits."""
    if not is_shared(tier):
        return None
    if tier.scheme != "file" and isinstance(backend, FileBackend):  # not one around another one
        books: Books | None = _bucket_books(tier, backend)
    else:
        books = books_of(tier, namespace.directory)
    assert books is not None
    return Collector(backend, books, Limits.of(tier, namespace.chunk_size))


class Collector:
    """Keeps one namespace within its limits, together with the collectors of other instances.

    Parameters
    ----------
    backend : Backend
        Open; it lists and deletes.
    books : Books
        Those of the namespace; closed with the collector.
    limits : Limits
    most : int
        Objects that a survey remembers.
    """

    def __init__(self, backend: Backend, books: Books, limits: Limits, *, most: int = MOST_VICTIMS) -> None:
        self._backend = backend
        self._books = books
        self._limits = limits
        self._most = most
        self._survey: Survey | None = None
        self._since, self._strangers = Turnover(), 0  # when the survey began
        self._surveyed = 0.0
        self._victims: list[tuple[float, int, bytes]] = []  # the oldest last
        self._fruitless = False
        self._oldest: float | None = None  # to be entered when a turn ends
        self._patient_until = 0.0  # doubts are no reason for another survey until then

    def turn(self, report: Report) -> Answer:
        """Take in `report`, work for a while if there is work, and answer.

        Raises
        ------
        OSError
            Books or objects cannot be read or written; what has been done is in the books.
        """
        until = time.monotonic() + self._books.seconds
        answer = self._books.change(partial(self._begin, report))
        if report.leaving:
            self._books.leave(report.instance.hex())
        if answer is not None:
            return answer
        if not self._books.take_lead():
            return self._books.change(partial(self._answer, report=report, removed=[], more=False))
        removed: list[Row] = []
        try:
            self._go_on(report, until, removed)
        finally:
            answer = self._books.change(partial(self._end, report, removed))
        return answer

    def close(self) -> None:
        """Let go of the lead, and of the books."""
        self._books.close()

    def _begin(self, report: Report, accounts: Accounts) -> Answer | None:
        """Enter the report; an answer when there is nothing to do."""
        accounts.enter(report)
        self._books.join(accounts, report.instance.hex())
        if report.leaving:
            self._rest(accounts)
            del accounts.members[report.instance.hex()]
            return Answer(0, accounts.size, accounts.chunks, more=False)
        if accounts.counted and not report.work:
            return self._answer(accounts, report, [], more=self._books.leads(accounts))
        if not self._work(accounts, report):
            self._rest(accounts)
            return self._answer(accounts, report, [], more=False)
        return None

    def _end(self, report: Report, removed: list[Row], accounts: Accounts) -> Answer:
        """Enter what was removed. Whoever has lost the lead enters nothing: the next one surveys."""
        leads = self._books.leads(accounts)
        if leads:
            accounts.removed(len(removed), sum(size for _, size, _ in removed))
            accounts.deleting = False
            if self._oldest is not None:
                accounts.oldest = self._oldest
        more = leads and self._work(accounts, report) and not self._fruitless
        if not more:
            self._rest(accounts)
        return self._answer(accounts, report, removed, more=more)

    # What there is to do.

    def _work(self, accounts: Accounts, report: Report) -> bool:
        if not accounts.counted or self._survey is not None:
            return True
        return self._excess(accounts, report) > 0 or self._expired_before() > accounts.oldest

    def _excess(self, accounts: Accounts, report: Report) -> int:
        free = self._books.free()
        excess = self._limits.excess(accounts.size, accounts.claimed, report.needed, free, accounts.average)
        if excess and not self._books.leads(accounts):
            self._books.bury_the_dead(accounts)
        return excess

    def _expired_before(self) -> float:
        """Objects last used before this time have expired."""
        return self._books.now() - self._limits.ttl if self._limits.ttl is not None else float("-inf")

    def _go_on(self, report: Report, until: float, removed: list[Row]) -> None:
        """Survey, if that has to be done first; then delete."""
        self._fruitless, self._oldest = False, None
        excess, expired = self._books.change(partial(self._prepare, report))
        if self._survey is not None:
            if not self._advance_survey(self._survey, until):
                return
            chunks, size, self._victims = self._survey.chunks, self._survey.size, self._survey.oldest.take()
            self._survey = None
            excess = self._books.change(partial(self._reconcile, report, chunks, size))
            self._fruitless = not self._victims
            self._patient_until = time.monotonic() + _PATIENCE
        self._delete(excess, expired, until, removed)
        if self._limits.ttl is not None:
            self._oldest = self._victims[-1][0] if self._victims else self._surveyed

    def _prepare(self, report: Report, accounts: Accounts) -> tuple[int, float]:
        """Begin a survey if there has to be one; returns what to delete: bytes, and what has expired."""
        excess = self._excess(accounts, report)
        doubt = accounts.doubtful and excess > 0 and time.monotonic() >= self._patient_until
        if self._survey is None and (not self._victims or not accounts.counted or accounts.deleting or doubt):
            self._since, self._strangers = copy.copy(accounts.turnover), accounts.strangers
            self._surveyed = self._books.now()
            self._survey = Survey(self._backend.scan(), self._most)
        accounts.deleting = True
        return excess, self._expired_before()

    def _reconcile(self, report: Report, chunks: int, size: int, accounts: Accounts) -> int:
        """Compare the accounts with what a survey has seen; returns what to delete."""
        accounts.reconcile(chunks, size, self._since)
        if accounts.strangers != self._strangers:
            accounts.counted = False
        return self._excess(accounts, report)

    def _advance_survey(self, survey: Survey, until: float) -> bool:
        try:
            return survey.advance(until)
        except BaseException:
            self._survey = None
            self._books.change(_doubt)  # what could not be seen is not counted
            raise

    # Deletion.

    def _delete(self, excess: int, expired: float, until: float, removed: list[Row]) -> None:
        """Delete the oldest, while there is too much or they have expired."""
        while self._victims and time.monotonic() < until and self._books.keep_lead():
            batch = self._next_batch(excess, expired)
            if not batch:
                return
            batch = self._books.still_unused(batch)
            if batch:
                excess -= sum(size for _, size, _ in batch)
                self._delete_batch(batch, until, removed)

    def _next_batch(self, excess: int, expired: float) -> list[Row]:
        """Take some of the oldest, no more than have to go."""
        batch: list[Row] = []
        while self._victims and len(batch) < self._books.batch:
            mtime, size, key = self._victims[-1]
            if excess <= 0 and mtime >= expired:
                break
            self._victims.pop()
            batch.append((key, size, mtime))
            excess -= size
        return batch

    def _delete_batch(self, batch: list[Row], until: float, removed: list[Row]) -> None:
        try:
            self._backend.delete([key for key, _, _ in batch])
        except OSError:
            self._delete_singly(batch, until, removed)
        else:
            removed += batch

    def _delete_singly(self, batch: list[Row], until: float, removed: list[Row]) -> None:
        """One of them cannot be deleted: the others can, at least one in a turn; the rest come next."""
        last: OSError | None = None
        before = len(removed)
        for done, row in enumerate(batch):
            if (done and time.monotonic() >= until) or not self._books.keep_lead():
                self._victims += [(mtime, size, key) for key, size, mtime in reversed(batch[done:])]
                break
            try:
                self._backend.delete([row[0]])
            except OSError as error:
                last = error
            else:
                removed.append(row)
        if last is not None and len(removed) == before:
            raise last

    # Books.

    def _answer(self, accounts: Accounts, report: Report, removed: list[Row], *, more: bool) -> Answer:
        """Grant what is expected soon, below the high watermark; above it, what waits."""
        room = 0
        if accounts.counted:
            room = self._limits.room(accounts.size, accounts.claimed, self._books.free())
        granted = min(report.wanted, max(room - self._limits.step, min(report.needed, room)))
        if granted < report.least:
            granted = 0
        accounts.grant(report, granted)
        return Answer(granted, accounts.size, accounts.chunks, more, removed)

    def _rest(self, accounts: Accounts) -> None:
        """There is nothing to do: let others collect."""
        self._survey = None
        self._books.lay_down(accounts)


def _doubt(accounts: Accounts) -> None:
    """Let somebody survey before the next eviction; if nobody has yet, before the next grant."""
    accounts.doubtful = True
