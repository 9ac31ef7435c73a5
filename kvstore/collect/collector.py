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
4. Where the root has a total, and the namespace's share of it is used up: ask for a larger one, and make room
   in the root if there is none and nobody else is at it (:mod:`kvstore.collect.total`).
"""

from __future__ import annotations

import copy
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..backends.files import FileBackend
from ..units import format_size
from .accounting import Accounts, Share, Turnover
from .limits import Limits, is_shared
from .places import Root, books_beside, books_of
from .report import Answer, Report, Row
from .survey import MOST_VICTIMS, Survey

if TYPE_CHECKING:
    from ..backends import Backend
    from ..config import TierConfig
    from ..namespace import Namespace
    from .books import Books
    from .total import Total

__all__ = ["Collector", "collector_of"]

_log = logging.getLogger("kvstore")

#: Seconds from one survey to the next that doubts alone can give rise to.
_PATIENCE = 30.0


def collector_of(tier: TierConfig, namespace: Namespace, backend: Backend) -> Collector | None:
    """The collector of `tier` for one namespace; None when its instances share no limits."""
    if not is_shared(tier):
        return None
    if tier.scheme != "file" and isinstance(backend, FileBackend):  # not one around another one
        books: Books | None = books_beside(tier, backend)
    else:
        books = books_of(tier, namespace.directory)
    assert books is not None
    limits = Limits.of(tier, namespace.chunk_size)
    total = _total_of(tier, namespace, backend, limits)
    return Collector(backend, books, limits, total=total, place=tier.url)


def _total_of(tier: TierConfig, namespace: Namespace, backend: Backend, limits: Limits) -> Total | None:
    if tier.total is None:
        return None
    from .total import Total

    of_all = Limits(tier.total, None, None, limits.largest)
    return Total(Root(tier, backend), namespace.directory, of_all)


class _Lack(NamedTuple):
    """A `share` that is too small: bytes that still wait, and what it has to be for all that waits, and for
    what is expected."""

    share: Share
    waiting: int
    needed: int
    wanted: int


class Collector:
    """Keeps one namespace within its limits, together with the collectors of other instances.

    Parameters
    ----------
    backend : Backend
        Open; it lists and deletes.
    books : Books
        Those of the namespace; closed with the collector.
    limits : Limits
    total : Total, optional
        Of the root; closed with the collector.
    place : str
        How messages call the namespace.
    most : int
        Objects that a survey remembers.
    """

    def __init__(
        self,
        backend: Backend,
        books: Books,
        limits: Limits,
        *,
        total: Total | None = None,
        place: str = "",
        most: int = MOST_VICTIMS,
    ) -> None:
        self._backend = backend
        self._place = place
        self._has_warned = False
        self._books = books
        self._limits = limits
        self._total = total
        self._lack: _Lack | None = None
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
        self._lack = None
        answer = self._turn(report, until)
        if self._total is None:
            return answer
        if report.leaving:
            self._total.rest()
            return answer
        try:
            return self._ask_root(self._total, report, answer, until)
        except OSError:
            if not answer.granted and not answer.removed:
                raise
            return answer

    def _turn(self, report: Report, until: float) -> Answer:
        """A turn within the namespace."""
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
        if self._total is not None:
            self._total.close()
        self._books.close()

    def _begin(self, report: Report, accounts: Accounts) -> Answer | None:
        """Enter the report; an answer when there is nothing to do."""
        accounts.enter(report).capacity = self._limits.capacity or 0
        self._books.join(accounts, report.instance.hex())
        self._compare(accounts)
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

    def _compare(self, accounts: Accounts) -> None:
        """Say once that living instances keep to different capacities."""
        if self._has_warned or len(accounts.capacities) < 2:
            return
        self._books.bury_the_dead(accounts)
        sizes = [format_size(capacity) for capacity in sorted(accounts.capacities)]
        if len(sizes) > 1:
            self._has_warned = True
            _log.warning(
                "%s: stores here have different capacities, %s: each makes room for its own; "
                "give all the same",
                self._place,
                ", ".join(sizes),
            )

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
        accounts.reconcile(chunks, size, self._since, self._strangers)
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
        """Delete the oldest, while there is too much or they have expired; a batch in any case, for where
        books are slow they take all of a turn."""
        while self._victims and self._books.keep_lead():
            batch = self._next_batch(excess, expired)
            if not batch:
                return
            batch = self._books.still_unused(batch)
            if batch:
                excess -= sum(size for _, size, _ in batch)
                self._delete_batch(batch, until, removed)
            if time.monotonic() >= until:
                return

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
        if self._total is not None:
            granted = self._within_share(accounts, report, granted)
        accounts.grant(report, granted)
        return Answer(granted, accounts.size, accounts.chunks, more, removed)

    # The total of the root.

    def _within_share(self, accounts: Accounts, report: Report, wanted: int) -> int:
        """The part of `wanted` bytes for which the share is large enough; notes what is lacking."""
        taken, needed = accounts.taken, min(report.needed, wanted)
        granted = min(wanted, max(0, accounts.share.size - taken))
        if granted < report.least:
            granted = 0
        lack = _Lack(accounts.share, max(0, needed - granted), taken + needed, taken + wanted)
        self._lack = lack if granted < wanted else None
        return granted

    def _ask_root(self, total: Total, report: Report, answer: Answer, until: float) -> Answer:
        """Grant the rest, if the root has room for it; else see to it that it gets some."""
        answer = self._extend(total, report, answer)
        if answer.more:  # the namespace comes first
            total.rest()
            return answer
        if not report.work or not total.is_over():
            return answer._replace(more=total.busy)
        removed, more = total.make_room(self._lack.waiting if self._lack else 0, until)
        if self._lack is not None:  # the share may have been lowered
            answer = self._extend(total, report, self._grant_rest(report, answer))
        if more and self._lack is None and total.is_tight():
            total.rest()  # to whoever waits: here nobody does, so it would go on slowly
            more = False
        return answer._replace(more=more, removed=[*answer.removed, *removed])

    def _extend(self, total: Total, report: Report, answer: Answer) -> Answer:
        """Ask for a larger share, and grant what it allows on top of what `answer` does."""
        lack = self._lack
        if lack is None or not total.extend(self._books, lack.share, lack.needed, lack.wanted):
            return answer
        return self._grant_rest(report, answer)

    def _grant_rest(self, report: Report, answer: Answer) -> Answer:
        """What fits by now, on top of what `answer` grants."""
        done = answer.granted
        rest = report._replace(
            least=max(0, report.least - done),
            needed=max(0, report.needed - done),
            wanted=report.wanted - done,
        )
        more = self._books.change(partial(self._answer, report=rest, removed=[], more=answer.more))
        return more._replace(granted=done + more.granted, removed=answer.removed)

    def _rest(self, accounts: Accounts) -> None:
        """There is nothing to do: let others collect."""
        self._survey = None
        self._books.lay_down(accounts)


def _doubt(accounts: Accounts) -> None:
    """Let somebody survey before the next eviction; if nobody has yet, before the next grant."""
    accounts.doubtful = True
