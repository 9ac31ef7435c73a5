"""The plan of a test: rules, how often each has been met, what was injected, and whether it is over.

All state is in files of one folder, so that it is the same for every thread and process that works by the
plan: a file per rule whose length is the number of calls counted, a log of one JSON object per line, and a
file whose presence says that the plan is healed.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...backends import Backend, create
from ...config import TierConfig
from ...namespace import Namespace
from .rules import ERRORS, Fault, Rule, Verb, make_error

if TYPE_CHECKING:
    from .backend import FaultyBackend

__all__ = ["FaultPlan", "Injection"]

#: Seconds between two looks whether a hang is over.
_PAUSE = 0.005


class Injection(msgspec.Struct, frozen=True):
    """One fault that has happened: to what call, and in which process."""

    fault: Fault
    verb: Verb
    keys: list[str]
    tier: str
    step: int
    pid: int


class FaultPlan:
    """Injects faults; also the backend factory of a store whose storage is to fail.

    It can be pickled: give it to :func:`kvstore.opening.assemble` with any engine.

    Parameters
    ----------
    rules : iterable of Rule, or of mappings of a rule's fields
        The first rule that strikes is the only one that acts on a call; those behind it do not count the
        call.
    folder : path, optional
        Where the state is kept; made if absent. Plans with the same folder share it. Without one, a temporary
        folder goes when the plan that made it does.
    create : callable
        Makes the backends to be wrapped, as :func:`kvstore.backends.create` does.
    parent : int, optional
        Process that ``KILL_PARENT`` kills; the one that makes the plan, by default.

    Examples
    --------
    >>> plan = FaultPlan([Rule(Fault.EIO, "get", times=1)])
    >>> plan.meet("get")
    Traceback (most recent call last):
    OSError: [Errno 5] Input/output error (injected)
    >>> plan.meet("get")
    >>> [injection.fault.value for injection in plan.log()]
    ['EIO']
    """

    def __init__(
        self,
        rules: Iterable[Rule | Mapping[str, Any]],
        folder: str | os.PathLike[str] | None = None,
        *,
        create: Callable[[TierConfig, Namespace], Backend] = create,
        parent: int | None = None,
    ) -> None:
        self.rules = tuple(rule if isinstance(rule, Rule) else msgspec.convert(rule, Rule) for rule in rules)
        self._create = create
        self._parent = os.getpid() if parent is None else parent
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-faults-") if folder is None else folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if folder is None:
            weakref.finalize(self, _remove, self.folder, os.getpid())

    def __call__(self, tier: TierConfig, namespace: Namespace) -> FaultyBackend:
        """The backend of `tier`, with faults."""
        from .backend import FaultyBackend

        return FaultyBackend(self._create(tier, namespace), self, tier.name)

    @property
    def options(self) -> dict[str, Any]:
        """The plan as options of a ``fault::`` filesystem: ``storage_options={"fault": plan.options}``."""
        return {
            "rules": [msgspec.to_builtins(rule) for rule in self.rules],
            "folder": str(self.folder),
            "parent": self._parent,
        }

    def meet(self, verb: Verb, keys: Iterable[str] = (), *, tier: str = "", step: int = 0) -> Fault | None:
        """Inject what a call is due.

        Parameters
        ----------
        verb : str
        keys : iterable of str
            Hex digits of the keys that the call is about.
        tier : str
        step : int
            Step of the write protocol, 0 when the call has not begun.

        Returns
        -------
        Fault or None
            A fault of data (or ``VANISH``), which is the caller's to carry out; None when there is none, or
            when it is over.

        Raises
        ------
        OSError
            The fault is an error.
        """
        names = list(keys)
        for number, rule in enumerate(self.rules):
            if not rule.concerns(verb, names, tier, step) or self.healed:
                continue
            if rule.strikes(self._count(number)):
                self._note(Injection(rule.fault, verb, names, tier, step, os.getpid()))
                return self._inflict(rule)
        return None

    def heal(self) -> None:
        """Inject nothing more, and let go what hangs."""
        (self.folder / "healed").touch()

    @property
    def healed(self) -> bool:
        """Whether the faults are over."""
        return (self.folder / "healed").exists() or not self.folder.is_dir()

    def log(self) -> list[Injection]:
        """What has been injected so far by all who share the folder, in the order of events."""
        try:
            lines = (self.folder / "log").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [msgspec.json.decode(line, type=Injection) for line in lines]

    def _count(self, number: int) -> int:
        """Count one call for a rule; returns which call it was, from 1."""
        # Appending moves the descriptor to the end of what it has written: a count that needs no lock.
        fd = os.open(self.folder / f"rule-{number}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, b".")
            return os.lseek(fd, 0, os.SEEK_CUR)
        finally:
            os.close(fd)

    def _note(self, injection: Injection) -> None:
        with open(self.folder / "log", "ab", buffering=0) as file:
            file.write(msgspec.json.encode(injection) + b"\n")

    def _inflict(self, rule: Rule) -> Fault | None:
        if rule.fault in ERRORS:
            raise make_error(rule.fault)
        match rule.fault:
            case Fault.DELAY:
                time.sleep(rule.seconds)
            case Fault.HANG:
                self._hang()
            case Fault.KILL_WORKER:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.KILL_PARENT:
                os.kill(self._parent, signal.SIGKILL)
                self._hang()  # get no further than the parent did
            case _:
                return rule.fault
        return None

    def _hang(self) -> None:
        while not self.healed:
            time.sleep(_PAUSE)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
