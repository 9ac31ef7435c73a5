"""What goes wrong, where, and how often: plain data, so that rules also fit into JSON, TOML and pickles."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from enum import StrEnum
from typing import Literal

import msgspec

__all__ = ["ERRORS", "Fault", "Rule", "Verb", "damage", "make_error"]

Verb = Literal["open", "exists", "get", "put", "delete", "quarantine", "scan"]
"""Operation of a backend; ``get`` and ``put`` are the object verbs, below the verification."""


class Fault(StrEnum):
    """Kinds of faults.

    Four raise an OSError. Those of data return normally, and harm the bytes: ``SHORT_READ`` returns half of
    an object as if that were all, ``FLIPPED_BIT`` changes one bit of what is read or stored, ``TORN`` stores
    half of an object and reports success, ``SHORT_WRITE`` stores half and raises ENOSPC. ``VANISH`` deletes
    the object just before it is read. ``HANG`` waits until the plan is healed. ``KILL_WORKER`` sends SIGKILL
    to the process that runs the backend, ``KILL_PARENT`` to the one that made the plan.
    """

    EIO = "EIO"
    ENOSPC = "ENOSPC"
    EACCES = "EACCES"
    EMFILE = "EMFILE"
    SHORT_READ = "short-read"
    SHORT_WRITE = "short-write"
    FLIPPED_BIT = "flipped-bit"
    TORN = "torn"
    VANISH = "vanish"
    DELAY = "delay"
    HANG = "hang"
    KILL_WORKER = "kill-worker"
    KILL_PARENT = "kill-parent"


ERRORS = frozenset({Fault.EIO, Fault.ENOSPC, Fault.EACCES, Fault.EMFILE})
"""Faults that raise."""

_AT_STEPS = {Fault.DELAY, Fault.HANG, Fault.KILL_WORKER, Fault.KILL_PARENT}
_ONLY_WITH = {
    Fault.SHORT_READ: {"get"},
    Fault.VANISH: {"get"},
    Fault.SHORT_WRITE: {"put"},
    Fault.TORN: {"put"},
    Fault.FLIPPED_BIT: {"get", "put"},
}
_LAST_STEP = 8


class Rule(msgspec.Struct, frozen=True):
    """One fault, and the calls that meet it.

    Parameters
    ----------
    fault : Fault
    verb : str
        Operation that meets it.
    key : str
        Hex digits of the only key that meets it; empty for every key.
    tier : str
        Name of the only tier; empty for every tier. Filesystems have no names of tiers.
    skip : int
        Matching calls that pass before the first that meets the fault.
    times : int, optional
        Calls that meet it; None for all until the plan is healed.
    seconds : float
        Length of a ``DELAY``.
    step : int
        For ``put`` on ``file://`` tiers: number of the step of the write protocol (1 to 8, at the top of
        ``kvstore/backends/posix.py``) before which the fault comes. 0 is before the call.

    Raises
    ------
    ValueError
        The combination makes no sense.
    """

    fault: Fault
    verb: Verb
    key: str = ""
    tier: str = ""
    skip: int = 0
    times: int | None = None
    seconds: float = 0.05
    step: int = 0

    def __post_init__(self) -> None:
        """Refuse what could never happen."""
        verbs = _ONLY_WITH.get(self.fault)
        if verbs is not None and self.verb not in verbs:
            raise ValueError(f"{self.fault}: happens to {' and '.join(sorted(verbs))}, not to {self.verb}")
        if self.step and (self.verb != "put" or self.fault not in _AT_STEPS):
            raise ValueError(f"{self.fault} of {self.verb}: steps are for delay, hang and kill of a put")
        if not 0 <= self.step <= _LAST_STEP:
            raise ValueError(f"step {self.step} is not between 1 and {_LAST_STEP}")

    def concerns(self, verb: Verb, keys: Collection[str], tier: str, step: int) -> bool:
        """Whether a call is one that the rule counts; `keys` are hex digits."""
        return (
            verb == self.verb
            and step == self.step
            and (not self.key or self.key in keys)
            and (not self.tier or self.tier == tier)
        )

    def strikes(self, number: int) -> bool:
        """Whether the matching call `number`, counted from 1, meets the fault."""
        return self.skip < number and (self.times is None or number <= self.skip + self.times)


def damage(fault: Fault, data: bytes) -> bytes:
    """`data` as a fault of data leaves it: half of it, or with the bit in its middle flipped."""
    middle = len(data) // 2
    if fault is not Fault.FLIPPED_BIT:
        return data[:middle]
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def make_error(fault: Fault) -> OSError:
    """The exception that one of :data:`ERRORS` stands for."""
    number = getattr(errno, fault.value)
    return OSError(number, f"{os.strerror(number)} (injected)")
