"""The books of a namespace in a directory.

``accounting/state.json`` is one small file, replaced whole under a lock that is held for the moment of one
change. The lead is a lock, too, ``accounting/collector``. Every instance keeps a file
``accounting/<instance>.member`` locked while it lives: that is how the others learn of its death.
"""

# ruff: noqa: PTH105, PTH116 - system calls by their names

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from ..backends._directories import make_directories
from ..backends.layout import ACCOUNTING, object_name
from .accounting import Accounts
from .books import Books
from .limits import Free
from .lock import FileLock
from .report import Row

__all__ = ["LEAD", "DirectoryBooks"]

LEAD = "collector"
"""Name of the lock that the one who collects holds."""
_STATE, _LOCK, _MEMBER = "state.json", "lock", ".member"
#: Longest turn, in seconds.
_TURN = 0.05

_T = TypeVar("_T")


class DirectoryBooks(Books):
    """The files in which accounts are kept.

    Parameters
    ----------
    path : str
        Directory of the namespace.
    mode : int
        Permission bits of the files; the directory gets the matching search bits.
    seconds : float
        How long a turn may work.
    patience : float
        Seconds to wait for the lock of the accounts. Its holder needs a fraction of a millisecond, but on a
        busy machine it may be a good while until it gets that.
    """

    batch = 32

    def __init__(
        self, path: str, mode: int = 0o600, *, seconds: float = _TURN, patience: float = 1.0
    ) -> None:
        self.seconds = seconds
        self.path = f"{path}/{ACCOUNTING}"
        self._space = path
        self._mode = mode
        self._patience = patience
        self._state = f"{self.path}/{_STATE}"
        self._lock = self.lock(_LOCK)
        self._lead = self.lock(LEAD)
        self._members: dict[str, FileLock] = {}  # of the instances that report here

    # Accounts.

    def read(self) -> Accounts | None:
        """What the accounts say, without a lock."""
        try:
            with open(self._state, "rb") as file:
                return msgspec.json.decode(file.read(), type=Accounts)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None  # never begun, or torn by a crash of the machine: a survey begins them anew

    def change(self, function: Callable[[Accounts], _T]) -> _T:
        """Change the accounts under their lock."""
        with self.edit() as accounts:
            return function(accounts)

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
        self._make_place()
        if not self._lock.acquire(self._patience):
            raise TimeoutError(f"{self._lock.path}: somebody has held this lock for {self._patience:g} s")
        try:
            accounts = self.read() or Accounts()
            yield accounts
            self._write(accounts)
        finally:
            self._lock.release()

    def _make_place(self) -> None:
        ground = os.path.dirname(os.path.dirname(self._space))
        make_directories(self.path, self._mode | (self._mode & 0o444) >> 2, ground)

    def now(self) -> float:
        """Time of the last change, by the clock of the file system."""
        return os.stat(self._state).st_mtime

    def last_change(self) -> float:
        """The same, if there was one."""
        try:
            return self.now()
        except FileNotFoundError:
            return 0.0

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

    # Locks.

    def lock(self, name: str) -> FileLock:
        """A lock beside the accounts."""
        return FileLock(f"{self.path}/{name}", self._mode)

    def member_lock(self, name: str) -> FileLock:
        """The lock that the instance `name` holds while it lives."""
        return self.lock(name + _MEMBER)

    def join(self, accounts: Accounts, name: str) -> None:
        """Lock the file of the instance."""
        if name not in self._members:
            self._members[name] = self.member_lock(name)
        self._members[name].acquire()

    def leave(self, name: str) -> None:
        """Remove the file of the instance."""
        self._members.pop(name).remove()

    def is_used(self) -> bool:
        """Whether the file of an instance is locked."""
        accounts = self.read() or Accounts()
        return any(not self._is_dead(name) for name, member in accounts.members.items() if not member.gone)

    def bury_the_dead(self, accounts: Accounts) -> None:
        """Find the instances whose files are not locked."""
        for name in list(accounts.members):
            if self._is_dead(name):
                accounts.bury(name, time.time())

    def _is_dead(self, name: str) -> bool:
        lock = self.member_lock(name)
        if not os.access(lock.path, os.F_OK):
            return True
        if not lock.acquire():
            return False
        lock.remove()
        return True

    def take_lead(self, patience: float = 0.0) -> bool:
        """Lock the collector's file."""
        self._make_place()
        return self._lead.acquire(patience)

    def leads(self, accounts: Accounts) -> bool:
        """Whether the collector's file is locked here, whatever the accounts say."""
        return self._lead.held

    def keep_lead(self) -> bool:
        """Whether the collector's file is locked here: a lock does not run out."""
        return self._lead.held

    def lay_down(self, accounts: Accounts) -> None:
        """Unlock the collector's file."""
        self._lead.release()

    def close(self) -> None:
        """Unlock everything."""
        self._lead.release()
        for member in self._members.values():
            member.release()

    # The storage.

    def free(self) -> Free:
        """Room on the file system."""
        return Free.at(self._space)

    def still_unused(self, rows: Sequence[Row]) -> list[Row]:
        """One ``stat`` each. Whoever has deleted a file may have told the books; if not, the next survey
        does."""
        return [row for row in rows if self._is_unused_since(row[0], row[2])]

    def _is_unused_since(self, key: bytes, mtime: float) -> bool:
        try:
            return os.stat(f"{self._space}/{object_name(key)}").st_mtime <= mtime
        except FileNotFoundError:
            return False
