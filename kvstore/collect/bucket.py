"""The books of a namespace in a bucket.

``accounting/state.json`` is one small object. It is changed by reading it and writing it back on the
condition that nobody else has changed it meanwhile (``If-Match``); who is late reads again. So changes happen
one after another, and one that is lost with its instance is none. When an answer is lost, and the client's
repetition finds the change made, it must not be made twice: the accounts of a report do not change by that,
and what the holder of the lead has changed bears a mark.

The lead is a lease in the same object. How it is taken, kept and lost:

1. Nobody has it: enter oneself, with a beat and the seconds that the lease is good for. One writer wins.
2. Who has it raises the beat, before half of these seconds have passed since it *asked* for the last one.
   When they have, it deletes nothing until it has raised the beat again, which fails after step 4.
3. The others watch. When the beat has stood still for all of these seconds, by the watch of whoever looks,
   the holder is dead or hung, and the next one enters itself. So no two clocks are ever compared.
4. The next one surveys first, for nobody knows how far the other one had come. A holder that wakes up finds
   somebody else entered when it next looks; what it has deleted last is not subtracted, since the survey may
   have seen it gone.

A batch is a look at its objects and a request to delete them. The client gives up each within the tier's
timeout, so a batch takes less than two timeouts, half of a lease. Where the request fails, its objects are
deleted one by one, with another look at the lead before each.

What is left is a request that is carried out after the lease has run out: the holder was stopped between its
look and the request, or the server carries out late what the client has given up. These objects go, one batch
at most, though somebody else has the lead. They were used least recently all the same, and the accounts get
too high, never too low.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import msgspec
from msgspec import structs

from ..backends._s3_versions import Version, VersionedObjects
from ..backends.layout import ACCOUNTING, object_name
from .accounting import Accounts, Lease
from .books import Books
from .limits import GRANT_SECONDS, Free
from .report import Row

__all__ = ["BucketBooks"]

_STATE = f"{ACCOUNTING}/state.json"
#: Longest turn, in seconds.
_TURN = 1.0
#: How many of a tier's timeouts a lease is good for: a batch takes less than half of that, and begins before
#: the other half is over.
_LEASE = 4.0
#: Seconds without a report after which an instance that was granted something is dead: it does not use a
#: grant any longer by then.
_SILENCE = 2 * GRANT_SECONDS
#: Longest pause (seconds) after the first of others' changes, and after many.
_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
#: Seconds between two looks at a lease.
_LOOK = 0.2

_T = TypeVar("_T")


class BucketBooks(Books):
    """The object in which accounts are kept.

    Parameters
    ----------
    objects : VersionedObjects
        Of the namespace.
    timeout : float
        Seconds that the tier's requests may take; a lease is good for four times as long.
    patience : float
        Seconds to go on while others change the accounts. A turn may work as long, one second at most.
    """

    batch = 128

    def __init__(self, objects: VersionedObjects, *, timeout: float = 10.0, patience: float = 10.0) -> None:
        self.seconds = min(patience, _TURN)
        self._patience = patience
        self._lease_seconds = _LEASE * timeout
        self._objects = objects
        self._name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(8).hex()}"  # people read it, too
        self._now = 0.0
        self._good_until = 0.0  # by _watch: then the lead has to be entered again
        self._seen = Lease()  # another one's, and since when it is the same
        self._since = 0.0

    # Accounts.

    def read(self) -> Accounts | None:
        """What the accounts say: one GET."""
        return _decode(self._objects.read(_STATE))

    def change(self, function: Callable[[Accounts], _T]) -> _T:
        """Read, change, and write on condition: one GET and one PUT; only the GET if nothing changes."""
        deadline, pause, mark = time.monotonic() + self._patience, _PAUSE, os.urandom(8).hex()
        result: _T | None = None
        while True:
            found = self._objects.read(_STATE)
            if found is None:  # only the answer to a read that finds something tells the time
                self._objects.replace(_STATE, msgspec.json.encode(Accounts()), "")
            else:
                self._now = found.now
                accounts = _decode(found) or Accounts()
                if accounts.lease.change == mark:  # it was made, and the answer was lost
                    return cast("_T", result)
                result = function(accounts)
                if self._put_back(accounts, found, mark):
                    return result
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{_STATE}: others have changed it all the time for {self._patience:g} s")
            time.sleep(random.random() * pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _put_back(self, accounts: Accounts, found: Version, mark: str) -> bool:
        """Write the accounts, if they have changed; False when others were faster."""
        if msgspec.json.encode(accounts) == found.data:
            return True
        if self.leads(accounts):
            accounts.lease = structs.replace(accounts.lease, change=mark)
        return self._objects.replace(_STATE, msgspec.json.encode(accounts), found.tag)

    def now(self) -> float:
        """The time of the server."""
        return self._now

    def last_change(self) -> float:
        """When the object was written last: one GET."""
        found = self._objects.read(_STATE)
        return 0.0 if found is None else found.changed

    # Instances.

    def join(self, accounts: Accounts, name: str) -> None:
        """Note the time of the report."""
        accounts.members[name].seen = self._now

    def leave(self, name: str) -> None:
        """Nothing but the entry has to go."""

    def bury_the_dead(self, accounts: Accounts) -> None:
        """Find the instances that have not reported for long."""
        for name in [name for name, member in accounts.members.items() if self._is_silent(member.seen)]:
            accounts.bury(name, self._now)

    def is_used(self) -> bool:
        """Whether an instance has reported lately: one GET."""
        found = self._objects.read(_STATE)
        accounts = _decode(found)
        if found is None or accounts is None:
            return False
        self._now = found.now
        return any(not self._is_silent(member.seen) for member in accounts.members.values())

    def _is_silent(self, seen: float) -> bool:
        return self._now - seen > _SILENCE

    # The lead, by the steps at the top of this file.

    def take_lead(self, patience: float = 0.0) -> bool:
        """Enter the lease, or raise its beat."""
        deadline = time.monotonic() + patience
        while True:
            asked = _watch()
            if self.change(self._take):
                self._good_until = asked + self._lease_seconds / 2
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK)

    def _take(self, accounts: Accounts) -> bool:
        lease = accounts.lease
        if lease.holder not in ("", self._name) and not self._has_run_out(lease):
            return False
        accounts.lease = Lease(self._name, lease.beat + 1, self._lease_seconds)
        return True

    def _has_run_out(self, lease: Lease) -> bool:
        if lease != self._seen:
            self._seen, self._since = lease, _watch()
        return _watch() - self._since > lease.seconds

    def leads(self, accounts: Accounts) -> bool:
        """Whether the accounts name these books."""
        return accounts.lease.holder == self._name

    def keep_lead(self) -> bool:
        """Whether the lease is good for a batch; its beat is raised when half of it is over.

        It is not taken anew here: what was deleted before it was lost must not be subtracted any more.
        """
        asked = _watch()
        if asked < self._good_until:
            return True
        if not self.change(self._raise_beat):
            return False
        self._good_until = asked + self._lease_seconds / 2
        return True

    def _raise_beat(self, accounts: Accounts) -> bool:
        return self.leads(accounts) and self._take(accounts)

    def lay_down(self, accounts: Accounts) -> None:
        """Take the own name out of the lease."""
        if self.leads(accounts):
            accounts.lease = Lease(beat=accounts.lease.beat + 1)
        self._good_until = 0.0

    def close(self) -> None:
        """Give the lead back, if the server answers, and close the connections."""
        try:
            if self._good_until:
                self.change(self.lay_down)
        except OSError:  # then it runs out
            pass
        finally:
            self._objects.close()

    # The storage.

    def free(self) -> Free:
        """There is always room in a bucket."""
        return Free.endless()

    def still_unused(self, rows: Sequence[Row]) -> list[Row]:
        """One HEAD each. An object's time is that of its last use: see :mod:`kvstore.backends.s3`."""
        times = self._objects.times([object_name(key) for key, _, _ in rows])
        return [row for row, last in zip(rows, times, strict=True) if last is not None and last <= row[2]]


def _decode(found: Version | None) -> Accounts | None:
    """Accounts of an object; None when it is absent, or not ours: a survey begins them anew."""
    try:
        return None if found is None else msgspec.json.decode(found.data, type=Accounts)
    except msgspec.DecodeError:
        return None


def _watch() -> float:
    """Seconds that go on while a process is stopped, and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
