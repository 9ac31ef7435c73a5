"""The contract of a copier: what moves bytes between device blocks and host slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..acks import Direction
from .layout import Placed

__all__ = ["Copier", "Transfer"]


class Transfer(ABC):
    """Copies on their way.

    Attributes
    ----------
    nbytes : int
        Bytes of blocks that are copied.
    """

    nbytes: int

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not; waits a tenth of a millisecond at most."""

    @abstractmethod
    def wait(self) -> None:
        """Return once it has ended, well or not."""

    @abstractmethod
    def seconds(self) -> float:
        """What the copies took, once done.

        Raises
        ------
        Exception
            Whatever kept them from being made; the bytes at the target are then anything.
        """


class Copier(ABC):
    """Copies for one rank.

    It trusts the places it is given: who made them has checked them. Transfers of one direction are made in
    the order of `start`; the two directions are independent of each other. One thread calls.
    """

    @abstractmethod
    def start(self, direction: Direction, groups: Sequence[Placed]) -> Transfer:
        """Copy blocks to slots ("store") or slots to blocks ("load"), and return before it is done.

        A store reads what has been written to the device before this call, and zeroes what it does not
        cover. A load comes after what has been written to the device before this call.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish all transfers, and let go of device and arena; nothing may be started afterwards."""
