"""Makes room in a root that several namespaces share.

Whoever has the lead in the root does it, in three steps, each only if the one before was not enough:

1. **Settle.** Lower every namespace's share to what it holds (:mod:`kvstore.collect.shares`). What is there
   and was not known is taken in; what has gone is dropped.
2. **Survey.** List all namespaces, and remember what was used least recently in any of them. Books in which
   somebody has died are put right by the way.
3. **Delete** the oldest, a batch at a time, each namespace's part by its own books and with the lead there.
   Where another collector has that, or nothing can be deleted, its objects stay for a while, and the next
   oldest go.

A namespace whose stores have no limits has no books. Its share is what the last survey has seen. Until every
namespace has a share the root is not counted, and nobody is granted anything.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import accumulate

from ..backends.files import FileBackend
from .accounting import Accounts, Share, Turnover
from .books import Books
from .limits import Free, Limits
from .places import Root
from .report import Row
from .shares import cover, drop, follow, lower_share, new_stamp
from .survey import MOST_VICTIMS, Oldest

__all__ = ["Clearance"]

#: Objects of a listing between two looks at the clock.
_STRIDE = 64
#: Seconds from one survey to the next that doubts alone can give rise to, and for which a namespace is passed
#: by from which nothing could be deleted.
_PATIENCE = 30.0
#: Bytes before a key that stand for its namespace.
_NUMBER = 4

_Work = Callable[[FileBackend, Books], int | None]


class Clearance:
    """The work of one who has the lead in a root.

    Parameters
    ----------
    root : Root
    books : Books
        Those of the root; with the lead while :meth:`steps` goes on.
    limits : Limits
        Those of the root.
    directory : str
        The namespace for which :meth:`take_removed` answers.
    most : int
        Objects that a survey remembers.
    """

    def __init__(
        self, root: Root, books: Books, limits: Limits, directory: str, most: int = MOST_VICTIMS
    ) -> None:
        self._root = root
        self._books = books
        self._limits = limits
        self._directory = directory
        self._most = most
        self._directories: list[str] = []  # by the number before a victim's key
        self._victims: list[tuple[float, int, bytes]] = []  # the oldest last
        self._patient_until = 0.0  # doubts are no reason for another survey until then
        self._passed_by: dict[str, float] = {}  # namespace -> until when surveys look for victims elsewhere
        self._stored: dict[str, int] = {}  # bytes in each namespace; the rest of its share is granted
        self._doubtful = False
        self._trouble: OSError | None = None
        self._removed: list[Row] = []
        self._going: Generator[None, None, None] | None = None

    def take_removed(self) -> list[Row]:
        """What was deleted in the one namespace since this was last asked."""
        removed, self._removed = self._removed, []
        return removed

    def steps(self, needed: int) -> Generator[None, None, None]:
        """Make room for `needed` bytes beyond all shares, and down to the low watermark if the high one is
        passed; pauses often.

        Raises
        ------
        OSError
            What is in the way of the last bit of room.
        """
        self._going = self._steps(needed)
        return self._going

    def stop(self) -> None:
        """Give up what :meth:`steps` was at."""
        if self._going is not None:
            self._going.close()
            self._going = None

    def _steps(self, needed: int) -> Generator[None, None, None]:
        self._trouble = None
        there = yield from self._settle_all()
        excess = self._excess(needed)
        doubt = self._doubtful and time.monotonic() >= self._patient_until
        if not self._shares().keys() >= set(there) or (excess and (doubt or not self._victims)):
            yield from self._survey()
            there, excess = self._directories, self._excess(needed)
        counted = self._books.change(partial(_count, there))
        while counted and excess > 0 and self._victims:
            for directory, rows in self._next_batch(excess).items():
                if not self._books.keep_lead():
                    return
                freed = self._within(directory, partial(self._delete, directory, rows))
                if freed is None:
                    self._pass_by(directory)
                excess -= freed or 0
                yield
        if self._trouble is not None and (excess > 0 or not counted):
            raise self._trouble

    def _excess(self, needed: int) -> int:
        """Bytes to delete."""
        root, stored = self._books.read() or Accounts(), sum(self._stored.values())
        granted = max(0, root.shared_out - stored)
        return self._limits.excess(stored, granted, needed, Free.endless(), 0)

    def _shares(self) -> dict[str, Share]:
        """By the books of the root."""
        return (self._books.read() or Accounts()).shares

    def _within(self, directory: str, work: _Work) -> int | None:
        """Work in a namespace; None, and it is left alone, if it is out of reach."""
        try:
            with self._root.enter(directory) as (backend, books):
                return work(backend, books)
        except OSError as error:
            self._trouble = error
            return None

    # Step 1.

    def _settle_all(self) -> Generator[None, None, list[str]]:
        """Returns the namespaces that are there; those without a share have to be surveyed."""
        self._doubtful = False
        self._stored = {}
        shares = self._shares()  # first: whoever has one was there before the listing, unless it was removed
        there = self._root.directories()
        for directory in sorted({*there, *shares}):
            if directory in there:
                self._within(directory, partial(self._settle, directory))
            else:
                self._books.change(partial(drop, directory, shares[directory]))
            yield
        return there

    def _settle(self, directory: str, _backend: FileBackend, books: Books) -> int:
        """Lower a share to what is taken; returns that."""
        accounts = books.read()
        if accounts is None or not accounts.counted:
            share = self._shares().get(directory)
            if share is not None:
                self._stored[directory] = share.size
            self._doubtful = True
            return 0
        held = max(accounts.share.size, accounts.taken)
        seen = self._books.change(partial(cover, directory, held, new_stamp()))
        size = books.change(partial(self._lower, directory, books, seen))
        self._books.change(partial(follow, directory, seen, size))
        return size

    def _lower(self, directory: str, books: Books, seen: Share, accounts: Accounts) -> int:
        books.bury_the_dead(accounts)
        self._doubtful = self._doubtful or _is_unsure(accounts)
        self._stored[directory] = accounts.size
        return lower_share(seen, new_stamp(), accounts)

    # Step 2.

    def _survey(self) -> Generator[None, None, None]:
        self._directories, oldest = self._root.directories(), Oldest(self._most)
        self._victims = []
        now = time.monotonic()
        self._passed_by = {name: until for name, until in self._passed_by.items() if until > now}
        for number, directory in enumerate(self._directories):
            try:
                with self._root.enter(directory) as (backend, books):
                    yield from self._visit(number, backend, books, oldest)
            except OSError as error:
                self._trouble = error
        self._victims = oldest.take()
        self._patient_until = time.monotonic() + _PATIENCE

    def _visit(
        self, number: int, backend: FileBackend, books: Books, oldest: Oldest
    ) -> Generator[None, None, None]:
        """Survey a namespace; where its books are out of reach, and it has no share, by the listing alone."""
        directory = self._directories[number]
        try:
            yield from self._look(number, backend, books, oldest)
        except OSError as error:
            self._trouble = error
            if directory not in self._shares():
                _, size = yield from self._list(number, backend, None)
                self._cover(directory, size)

    def _look(
        self, number: int, backend: FileBackend, books: Books, oldest: Oldest
    ) -> Generator[None, None, None]:
        """List a namespace; put its books right where that has to be done and nobody else is at it."""
        directory = self._directories[number]
        accounts = books.read()
        leads = accounts is not None and _is_unsure(accounts) and books.take_lead()
        before = books.read() or Accounts()
        passed_by = directory in self._passed_by
        chunks, size = yield from self._list(number, backend, None if passed_by else oldest)
        if leads:
            books.change(
                partial(_put_right, books, chunks, size, copy.copy(before.turnover), before.strangers)
            )
            self._settle(directory, backend, books)
        elif accounts is None:
            seen = self._cover(directory, size)
            if books.read() is None:  # still: so nobody has entered what was seen
                self._books.change(partial(follow, directory, seen, size))
        elif not accounts.counted:
            self._cover(directory, max(size, accounts.share.size, accounts.taken), size)
        elif directory not in self._stored:
            self._settle(directory, backend, books)

    def _list(
        self, number: int, backend: FileBackend, oldest: Oldest | None
    ) -> Generator[None, None, tuple[int, int]]:
        """Returns the objects of a namespace, and their bytes; `oldest` is to consider each."""
        prefix = number.to_bytes(_NUMBER)
        chunks = size = 0
        for chunks, found in enumerate(backend.scan(), 1):
            if oldest is not None:
                oldest.add(prefix + found.key, found.size, found.mtime)
            size += found.size
            if not chunks % _STRIDE:
                yield
        return chunks, size

    def _cover(self, directory: str, held: int, stored: int | None = None) -> Share:
        """Cover `held` bytes of a namespace, of which `stored` were seen; as a rule all of them."""
        self._stored[directory] = held if stored is None else stored
        return self._books.change(partial(cover, directory, held, new_stamp()))

    # Step 3.

    def _pass_by(self, directory: str) -> None:
        """Look for victims elsewhere for a while."""
        self._passed_by[directory] = time.monotonic() + _PATIENCE
        prefix = self._directories.index(directory).to_bytes(_NUMBER)
        self._victims = [victim for victim in self._victims if not victim[2].startswith(prefix)]

    def _next_batch(self, excess: int) -> dict[str, list[Row]]:
        """Take some of the oldest, no more than have to go, by namespace."""
        batch: dict[str, list[Row]] = {}
        for _ in range(self._books.batch):
            if excess <= 0 or not self._victims:
                break
            mtime, size, key = self._victims.pop()
            directory = self._directories[int.from_bytes(key[:_NUMBER])]
            batch.setdefault(directory, []).append((key[_NUMBER:], size, mtime))
            excess -= size
        return batch

    def _delete(self, directory: str, rows: list[Row], backend: FileBackend, books: Books) -> int | None:
        """Delete those of `rows` that were not used meanwhile; returns their bytes, None where another
        collector has the lead."""
        share = self._shares().get(directory, Share())  # before the books: without any, nobody has entered it
        accounts = books.read()
        kept = accounts is not None
        if kept and not books.take_lead():
            return None
        if accounts is not None:
            rows = _first(rows, accounts.size)  # the rest is so young that it was not reported yet
        rows = books.still_unused(rows)
        if kept:
            books.change(_begin)
        removed: list[Row] = []
        try:
            _delete_all(backend, rows, removed)
        finally:
            if kept:
                books.change(partial(_end, books, removed))
        freed = sum(size for _, size, _ in removed)
        if kept:
            self._settle(directory, backend, books)
        else:
            self._books.change(partial(follow, directory, share, max(0, share.size - freed)))
        if directory == self._directory:
            self._removed += removed
        return freed


def _delete_all(backend: FileBackend, rows: Sequence[Row], removed: list[Row]) -> None:
    """Delete at once, or one by one when that fails; raises when nothing can be deleted."""
    try:
        backend.delete([key for key, _, _ in rows])
    except OSError as error:
        for row in rows:
            try:
                backend.delete([row[0]])
            except OSError:
                continue
            removed.append(row)
        if not removed:
            raise error
    else:
        removed += rows


def _first(rows: Sequence[Row], size: int) -> list[Row]:
    """The first of `rows`, `size` bytes at most."""
    sums = accumulate(row[1] for row in rows)
    return [row for row, upto in zip(rows, sums, strict=True) if upto <= size]


def _is_unsure(accounts: Accounts) -> bool:
    """Whether a survey would put books right."""
    return not accounts.counted or accounts.doubtful or accounts.deleting


def _count(directories: Sequence[str], root: Accounts) -> bool:
    """Note that all namespaces are taken in, if they are; returns whether the root is counted."""
    root.counted = root.counted or root.shares.keys() >= set(directories)
    return root.counted


def _begin(accounts: Accounts) -> None:
    accounts.deleting = True


def _end(books: Books, removed: Sequence[Row], accounts: Accounts) -> None:
    """Enter what was deleted, and let others collect; whoever has lost the lead enters nothing."""
    if books.leads(accounts):
        accounts.removed(len(removed), sum(size for _, size, _ in removed))
        accounts.deleting = False
    books.lay_down(accounts)


def _put_right(
    books: Books, chunks: int, size: int, since: Turnover, strangers: int, accounts: Accounts
) -> None:
    """Compare with what a survey has seen, and let others collect."""
    if books.leads(accounts):
        accounts.reconcile(chunks, size, since, strangers)
        accounts.deleting = False
    books.lay_down(accounts)
