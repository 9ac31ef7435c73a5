"""Deletes what was used least recently, or not for long, from namespaces on any storage; and whole namespaces
that nobody uses.

Time of last use is the time of modification: stores stamp what they read; in a bucket, those with limits do.
Where nobody does, it is the time of creation. Where instances share limits, pruning takes the place of the
collector, so that the books stay right.
"""

# ruff: noqa: PTH106 - system calls by their names

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from ..backends.layout import MANIFEST, Kind, is_namespace
from ..config import TierConfig
from ..errors import BackendError
from ..scan import Finding, Space, Status, scan, spaces
from .accounting import Accounts
from .books import Books
from .places import books_of
from .survey import Oldest

__all__ = ["MOST_AT_ONCE", "Outcome", "find_books", "prune", "prune_orphaned"]

MOST_AT_ONCE = 1 << 19
"""Objects that one round of pruning remembers, some 100 MB of them."""
#: Objects that are deleted with one call of the backend.
_BATCH = 256
#: Seconds to wait until a collector that is at work pauses.
_PATIENCE = 60.0

_Note = Callable[[int, str], None]


@dataclass
class Outcome:
    """What was done to one namespace.

    Attributes
    ----------
    directory : str
    chunks, size : int
        Objects deleted (or that would be), and their bytes on storage.
    kept_chunks, kept_size : int
        The others.
    temporary : int
        Files of dead writers that were deleted.
    gone : bool
        Nothing is left of the namespace.
    errors : list of str
        Why something could not be deleted.
    """

    directory: str
    chunks: int = 0
    size: int = 0
    kept_chunks: int = 0
    kept_size: int = 0
    temporary: int = 0
    gone: bool = False
    errors: list[str] = field(default_factory=list)


def find_books(tier: TierConfig, directory: str) -> tuple[Books, Accounts] | None:
    """The books of a namespace, open, and what they say; None when its instances share no limits."""
    books = books_of(tier, directory)
    if books is None:
        return None
    accounts = books.read()
    if accounts is None:
        books.close()
        return None
    return books, accounts


def prune(
    tier: TierConfig,
    *,
    namespace: str | None = None,
    to: int | None = None,
    unused_for: float | None = None,
    dry_run: bool = False,
    note: _Note = lambda done, what: None,
    most: int = MOST_AT_ONCE,
) -> list[Outcome]:
    """Delete chunks, those first that were used least recently, whatever namespace they are in.

    Parameters
    ----------
    tier : TierConfig
    namespace : str, optional
        Only in the namespace of this directory.
    to : int, optional
        Until no more than so many bytes are left on storage.
    unused_for : float, optional
        Those that nobody has used for so many seconds.
    dry_run : bool
        Delete nothing.
    note : callable
        Told of the progress, as files seen and text.
    most : int
        Objects to remember in one round; there are as many rounds as it takes.

    Returns
    -------
    list of Outcome
        One for each namespace.

    Raises
    ------
    BackendError
        The collector of a namespace does not pause.
    OSError
        The tier cannot be listed.
    """
    pruning = _Pruning(tier, namespace, to, unused_for, dry_run, note, most)
    while pruning.round():
        pass
    return list(pruning.outcomes.values())


def prune_orphaned(
    tier: TierConfig,
    *,
    namespace: str | None = None,
    unused_for: float,
    dry_run: bool = False,
    note: _Note = lambda done, what: None,
) -> list[Outcome]:
    """Delete the namespaces that nobody has used for `unused_for` seconds, whole.

    A namespace in which a living instance has entered itself stays, and so does one whose manifest does not
    describe it, which may be somebody else's directory. Parameters and errors are as for :func:`prune`.
    """
    outcomes = []
    for space in _select(tier, namespace):
        outcome = Outcome(space.directory)
        last = _last_use(tier, space, outcome, note)
        if space.namespace is not None and is_namespace(space.directory) and time.time() - last > unused_for:
            outcome.chunks, outcome.kept_chunks = outcome.kept_chunks, 0
            outcome.size, outcome.kept_size = outcome.kept_size, 0
            outcome.gone = dry_run or _remove(tier, space, outcome)
        outcomes.append(outcome)
    return outcomes


class _Pruning:
    """Rounds of looking and deleting."""

    def __init__(
        self,
        tier: TierConfig,
        namespace: str | None,
        to: int | None,
        unused_for: float | None,
        dry_run: bool,
        note: _Note,
        most: int,
    ) -> None:
        self._tier = tier
        self._namespace = namespace
        self._to = to
        self._before = time.time() - unused_for if unused_for is not None else float("-inf")
        self._dry_run = dry_run
        self._note = note
        self._most = most
        self._chosen_all = False  # whether everything that the round remembered had to go
        self.outcomes: dict[str, Outcome] = {}

    def round(self) -> bool:
        """Look and delete; True when another round is needed."""
        oldest, order = Oldest(self._most), []
        seen = 0
        for number, space in enumerate(_select(self._tier, self._namespace)):
            outcome = self.outcomes.setdefault(space.directory, Outcome(space.directory))
            outcome.kept_chunks = outcome.kept_size = 0
            order.append(space.directory)
            for finding in scan(space, read=False):
                seen += 1
                if not seen % 1000:
                    self._note(seen, f"{seen:,} files")
                if finding.status is Status.LISTED and finding.key is not None:
                    outcome.kept_chunks += 1
                    outcome.kept_size += finding.size
                    oldest.add(number.to_bytes(4, "big") + finding.key, finding.size, finding.mtime)
                elif finding.status is Status.STALE_TEMP:
                    outcome.temporary += self._dry_run or space.backend.remove_file(finding.name)
        doomed = self._choose(oldest, order)
        deleted = sum(self._delete(space, doomed) for space in _select(self._tier, self._namespace))
        return oldest.passed and deleted > 0 and not self._dry_run and self._chosen_all

    def _choose(self, oldest: Oldest, order: list[str]) -> dict[str, list[tuple[bytes, int]]]:
        """Keys and sizes of what has to go, by namespace."""
        left = sum(outcome.kept_size for outcome in self.outcomes.values())
        doomed: dict[str, list[tuple[bytes, int]]] = {}
        self._chosen_all = True
        for mtime, size, key in reversed(oldest.take()):
            unused = 0 < mtime < self._before  # a time that the storage does not tell is not long ago
            if not unused and (self._to is None or left <= self._to):
                self._chosen_all = False
                break
            doomed.setdefault(order[int.from_bytes(key[:4], "big")], []).append((key[4:], size))
            left -= size
        return doomed

    def _delete(self, space: Space, doomed: dict[str, list[tuple[bytes, int]]]) -> int:
        rows = doomed.get(space.directory)
        if not rows:
            return 0
        outcome = self.outcomes[space.directory]
        before = outcome.chunks
        with _alone(self._tier, space, dry_run=self._dry_run) as books:
            for start in range(0, len(rows), _BATCH):
                some = rows[start : start + _BATCH]
                if books is not None and not books.keep_lead():
                    outcome.errors.append("a collector has taken over meanwhile: prune again")
                    break
                if not self._dry_run:
                    try:
                        space.backend.delete([key for key, _ in some])
                    except OSError as error:
                        outcome.errors.append(str(error))
                        continue
                size = sum(size for _, size in some)
                outcome.chunks += len(some)
                outcome.size += size
                outcome.kept_chunks -= len(some)
                outcome.kept_size -= size
                if books is not None:
                    books.change(partial(_enter, books, len(some), size))
                self._note(outcome.chunks, f"{outcome.chunks:,} chunks deleted")
        return outcome.chunks - before


def _select(tier: TierConfig, namespace: str | None) -> Iterator[Space]:
    return (space for space in spaces(tier) if namespace in (None, space.directory))


@contextmanager
def _alone(tier: TierConfig, space: Space, *, dry_run: bool = False) -> Iterator[Books | None]:
    """Be the one who collects; gives the books, if there are any to be kept."""
    found = None if dry_run else find_books(tier, space.directory)
    if found is None:
        yield None
        return
    books, _ = found
    try:
        if not books.take_lead(_PATIENCE):
            raise BackendError(
                f"{space.directory}: a collector has been at work for {_PATIENCE:g} s", retryable=True
            )
        yield books
        books.change(books.lay_down)
    finally:
        books.close()


def _enter(books: Books, chunks: int, size: int, accounts: Accounts) -> None:
    if books.leads(accounts):
        accounts.removed(chunks, size)


def _last_use(tier: TierConfig, space: Space, outcome: Outcome, note: _Note) -> float:
    """When a namespace was last used, by what is stamped there, or without end; counts what it holds."""
    found = find_books(tier, space.directory)
    if found is not None and found[0].is_used():
        last = float("inf")
    else:
        manifests = (entry.mtime for entry in space.backend.entries("n") if entry.kind is Kind.MANIFEST)
        last = max(manifests, default=0.0)
    if found is not None:
        last = max(last, found[0].last_change())
        found[0].close()
    for number, finding in enumerate(scan(space, read=False), 1):
        last = max(last, finding.mtime)
        if finding.status is Status.LISTED:
            outcome.kept_chunks += 1
            outcome.kept_size += finding.size
        if not number % 1000:
            note(number, f"{number:,} files")
    return last


def _remove(tier: TierConfig, space: Space, outcome: Outcome) -> bool:
    """Delete a namespace but for what is not kvstore's; True when nothing is left."""
    backend = space.backend
    try:
        for keys in _batches(scan(space, read=False)):
            backend.delete(keys)
        rest = [entry for entry in backend.entries() if entry.kind is not Kind.FOREIGN]
        for entry in sorted(rest, key=lambda entry: entry.name == MANIFEST):  # the manifest last
            backend.remove_file(entry.name)
        left = any(True for _ in backend.entries())
    except OSError as error:
        outcome.errors.append(str(error))
        return False
    if tier.scheme == "file":
        for folder, _, _ in os.walk(f"{tier.path.rstrip('/')}/{space.directory}", topdown=False):
            with suppress(OSError):  # not empty
                os.rmdir(folder)
    return not left


def _batches(findings: Iterable[Finding]) -> Iterator[list[bytes]]:
    keys: list[bytes] = []
    for finding in findings:
        if finding.status is Status.LISTED and finding.key is not None:
            keys.append(finding.key)
        if len(keys) == _BATCH:
            yield keys
            keys = []
    if keys:
        yield keys
