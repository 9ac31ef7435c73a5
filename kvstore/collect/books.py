"""Where the instances of a namespace keep its accounts together, and settle who collects.

One at a time has the *lead*, which is the right to collect. Directories have locks for both
(:mod:`kvstore.collect.directory`); object storage has conditional writes (:mod:`kvstore.collect.bucket`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from .accounting import Accounts
from .limits import Free
from .report import Row

__all__ = ["Books"]

_T = TypeVar("_T")


class Books(ABC):
    """The books of one namespace; used by one thread.

    Attributes
    ----------
    seconds : float
        How long a turn of a collector may work.
    batch : int
        Objects that a collector deletes between two looks at the clock and at its lead.
    """

    seconds: float
    batch: int

    # Accounts.

    @abstractmethod
    def read(self) -> Accounts | None:
        """What the accounts say now; None when there are none."""

    @abstractmethod
    def change(self, function: Callable[[Accounts], _T]) -> _T:
        """Let `function` change the accounts in place; returns its result.

        It may be called several times, each time with the accounts as they are by then: only what the last
        call has changed counts.

        Raises
        ------
        OSError
            They cannot be read or written; `TimeoutError` when others change them all the time.
        """

    @abstractmethod
    def now(self) -> float:
        """The time, by the clock of the storage, as all times of its objects are; good within a change and
        after it."""

    @abstractmethod
    def last_change(self) -> float:
        """When the accounts were changed last; 0 when there are none."""

    # Instances.

    @abstractmethod
    def join(self, accounts: Accounts, name: str) -> None:
        """The instance `name`, which has an entry, lives."""

    @abstractmethod
    def leave(self, name: str) -> None:
        """The instance `name` ends."""

    @abstractmethod
    def bury_the_dead(self, accounts: Accounts) -> None:
        """Find the instances that have died without leaving."""

    @abstractmethod
    def is_used(self) -> bool:
        """Whether an instance that has entered itself is alive."""

    # The lead.

    @abstractmethod
    def take_lead(self, patience: float = 0.0) -> bool:
        """Take the lead, or keep it, within `patience` seconds; False when somebody else has it."""

    @abstractmethod
    def leads(self, accounts: Accounts) -> bool:
        """Whether these books have the lead, now that the accounts stand as they do."""

    @abstractmethod
    def keep_lead(self) -> bool:
        """Whether there is time to delete a batch before anybody else may have the lead."""

    @abstractmethod
    def lay_down(self, accounts: Accounts) -> None:
        """Let others have the lead."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    # The storage.

    @abstractmethod
    def free(self) -> Free:
        """Room on the storage."""

    @abstractmethod
    def still_unused(self, rows: Sequence[Row]) -> list[Row]:
        """Those of `rows` whose objects are there, and were not used after the time that stands with them."""
