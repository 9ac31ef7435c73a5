"""The shared books of a namespace: what it holds, and what each instance has been granted.

``accounting/state.json`` is one small file, replaced whole under a lock that is held for the moment of one
change. Every instance has an entry, and a file ``accounting/<instance>.member`` that it keeps locked while it
lives: that is how the others learn of its death.

An instance may write only what it has been granted, and a grant counts as taken. So a change that gets lost
with its instance, at any moment, makes the books too high, never too low, and the next survey of the
directory puts that right.
"""

# ruff: noqa: PTH105, PTH116 - system calls by their names

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from ..backends._directories import make_directories
from ..backends.layout import ACCOUNTING
from .lock import FileLock
from .report import Report

__all__ = ["Accounts", "Books", "Member", "Turnover"]

_STATE, _LOCK, _MEMBER = "state.json", "lock", ".member"
#: Seconds for which the entry of a dead instance is kept: its worker may be replaced, and report again.
_KEEP = 3600.0


class Turnover(msgspec.Struct):
    """Objects created and deleted by instances, and their bytes: numbers that only grow."""

    created: int = 0
    created_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0


class Member(Turnover):
    """The entry of one instance.

    `claimed` bytes are granted and not reported as created; `unsure` deletions may have deleted anything;
    `gone` is the time at which it was found dead, 0 while it lives.
    """

    claimed: int = 0
    unsure: int = 0
    gone: float = 0.0


class Accounts(msgspec.Struct):
    """What the books say.

    Attributes
    ----------
    size, chunks : int
        Bytes on storage, and objects.
    counted : bool
        Whether a survey stands behind them.
    doubtful : bool
        Whether an instance has died with a grant in hand, or has deleted it knows not what: a survey has to
        come before the next eviction.
    deleting : bool
        Whether a collector is at work: what it has deleted is entered when it pauses.
    oldest : float
        No object was used last before this time (seconds since the epoch).
    turnover : Turnover
        Of all instances there ever were.
    members : dict
        Name of an instance in hex -> its entry.
    """

    size: int = 0
    chunks: int = 0
    counted: bool = False
    doubtful: bool = False
    deleting: bool = False
    oldest: float = 0.0
    turnover: Turnover = msgspec.field(default_factory=Turnover)
    members: dict[str, Member] = {}

    @property
    def claimed(self) -> int:
        """Bytes granted to all instances."""
        return sum(member.claimed for member in self.members.values())

    @property
    def average(self) -> int:
        """Bytes of an object, on average."""
        return self.size // max(1, self.chunks)

    def enter(self, report: Report) -> Member:
        """Take over what an instance reports; returns its entry."""
        member = self.members.setdefault(report.instance.hex(), Member())
        for name in Turnover.__struct_fields__:
            grown = max(0, getattr(report, name) - getattr(member, name))
            setattr(member, name, getattr(report, name))
            setattr(self.turnover, name, getattr(self.turnover, name) + grown)
            part = "size" if name.endswith("bytes") else "chunks"
            self._change(part, grown if name.startswith("created") else -grown)
        self.doubtful = self.doubtful or report.unsure > member.unsure
        member.unsure = report.unsure
        member.claimed = report.claimed
        member.gone = 0.0
        return member

    def removed(self, chunks: int, size: int) -> None:
        """The collector has deleted so much."""
        self._change("chunks", -chunks)
        self._change("size", -size)

    def bury(self, name: str, now: float) -> None:
        """An instance is dead: what it was granted may have been written."""
        member = self.members[name]
        if member.claimed:
            self.doubtful = True
            self.size += member.claimed
            member.claimed = 0
        member.gone = member.gone or now
        if now - member.gone > _KEEP:
            del self.members[name]

    def reconcile(self, chunks: int, size: int, since: Turnover) -> None:
        """A survey has seen so much, while the turnover went on from `since`.

        What came or went meanwhile may have been seen or not, which gives bounds; books within them stay.
        """
        created = self.turnover.created_bytes - since.created_bytes
        deleted = self.turnover.deleted_bytes - since.deleted_bytes
        self.size = min(max(self.size, size - deleted - self.claimed, 0), size + created)
        created = self.turnover.created - since.created
        deleted = self.turnover.deleted - since.deleted
        writing = sum(1 for member in self.members.values() if member.claimed)
        slack = deleted + (self.claimed // max(1, self.average) if writing else 0)
        self.chunks = min(max(self.chunks, chunks - slack, 0), chunks + created)
        self.counted, self.doubtful = True, False

    def _change(self, name: str, by: int) -> None:
        setattr(self, name, max(0, getattr(self, name) + by))


class Books:
    """The files in which accounts are kept.

    Parameters
    ----------
    path : str
        Directory of the namespace.
    mode : int
        Permission bits of the files; the directory gets the matching search bits.
    patience : float
        Seconds to wait for the lock.
    """

    def __init__(self, path: str, mode: int = 0o600, patience: float = 1.0) -> None:
        self.path = f"{path}/{ACCOUNTING}"
        self._mode = mode
        self._patience = patience
        self._state = f"{self.path}/{_STATE}"
        self._lock = FileLock(f"{self.path}/{_LOCK}", mode)

    def read(self) -> Accounts | None:
        """What the books say, without a lock; None when there are none."""
        try:
            with open(self._state, "rb") as file:
                return msgspec.json.decode(file.read(), type=Accounts)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None  # never begun, or torn by a crash of the machine: a survey begins them anew

    @contextmanager
    def edit(self) -> Iterator[Accounts]:
        """The accounts, to be changed in place; they are written when the block ends well.

        Raises
        ------
        TimeoutError
            Somebody has held the lock for too long.
        OSError
            The files cannot be written.
        """
        self._make_directory()
        if not self._lock.acquire(self._patience):
            raise TimeoutError(f"{self._lock.path}: somebody has held this lock for {self._patience:g} s")
        try:
            accounts = self.read() or Accounts()
            yield accounts
            self._write(accounts)
        finally:
            self._lock.release()

    def now(self) -> float:
        """Time of the last change, by the clock of the file system, as all times of its files are."""
        return os.stat(self._state).st_mtime

    def lock(self, name: str) -> FileLock:
        """Another lock beside the books."""
        return FileLock(f"{self.path}/{name}", self._mode)

    def member_lock(self, name: str) -> FileLock:
        """The lock that the instance `name` holds while it lives."""
        return self.lock(name + _MEMBER)

    def is_used(self) -> bool:
        """Whether an instance that has entered itself is alive."""
        accounts = self.read() or Accounts()
        return any(not self._is_dead(name) for name, member in accounts.members.items() if not member.gone)

    def bury_the_dead(self, accounts: Accounts, now: float) -> None:
        """Find the instances that have died without leaving."""
        for name in list(accounts.members):
            if self._is_dead(name):
                accounts.bury(name, now)

    def _is_dead(self, name: str) -> bool:
        lock = self.member_lock(name)
        if not os.access(lock.path, os.F_OK):
            return True
        if not lock.acquire():
            return False
        lock.remove()
        return True

    def _make_directory(self) -> None:
        make_directories(self.path, self._mode | (self._mode & 0o444) >> 2)

    def _write(self, accounts: Accounts) -> None:
        temp = f"{self._state}.{os.getpid():x}.tmp"
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, self._mode)
            with open(fd, "wb") as file:
                os.fchmod(fd, self._mode)
                file.write(msgspec.json.encode(accounts))
            os.replace(temp, self._state)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temp)
            raise
