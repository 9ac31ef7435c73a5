"""Resets of the cache: a new name for every chunk, and slots that workers may still touch.

vLLM resets when it sleeps, pauses or drops its prefix cache, and the weights may be others afterwards. So the
host is emptied, and from then on every key ends with an *epoch* of 8 random bytes: nothing stored before is
found again, in any tier. Transfers that vLLM drops on that occasion are never completed, though workers may
be in the middle of them. Their leases are kept until every rank has acknowledged their tickets.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from kvstore.leases import ReadLease, WriteLease

from ..acks import AckWords

__all__ = ["Quarantine", "Transfer", "new_epoch"]


@dataclass(frozen=True)
class Transfer:
    """A copy between device and host that a worker has been told to do.

    Attributes
    ----------
    lease : ReadLease or WriteLease
        Of its slots.
    ticket : int
        Which workers acknowledge.
    tiers : collection of str or None
        Names of the secondary tiers that its chunks go on to; None for all.
    """

    lease: ReadLease | WriteLease
    ticket: int
    tiers: Collection[str] | None = None

    @property
    def direction(self) -> Literal["load", "store"]:
        """Which of the two rows of tickets its ticket belongs to."""
        return "load" if isinstance(self.lease, ReadLease) else "store"

    def give_up(self) -> None:
        """End the lease; what was to be stored is not."""
        if isinstance(self.lease, ReadLease):
            self.lease.release()
        else:
            self.lease.abort()


class Quarantine:
    """Transfers that nobody completes."""

    def __init__(self, acks: AckWords) -> None:
        self._acks = acks
        self._waiting: deque[Transfer] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, transfers: Iterable[Transfer]) -> None:
        """Keep the leases of `transfers` until their workers are through with them."""
        self._waiting.extend(transfers)

    def sweep(self) -> None:
        """End the leases of those that every rank has acknowledged."""
        if not self._waiting:
            return
        done = {direction: self._acks.acknowledged(direction) for direction in ("load", "store")}
        waiting, self._waiting = self._waiting, deque()
        for transfer in waiting:
            if transfer.ticket <= done[transfer.direction]:
                transfer.give_up()
            else:
                self._waiting.append(transfer)


def new_epoch() -> bytes:
    """What keys end with from now on."""
    return os.urandom(8)
