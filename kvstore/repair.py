"""Mends what the scanner finds, one finding at a time, while stores may be at work in the same tier.

- A corrupt or foreign object is read again right before it is moved into ``quarantine/``: a store may have
  replaced it. What lies there under a name that kvstore gives to nothing is moved, too; nothing is deleted
  that somebody may want to look at.
- Temporary files go when they are old (:data:`~kvstore.scan.STALE_AFTER`); the young ones have writers.
- A torn manifest goes, after a second look, so that the next store that opens the namespace can write it. A
  manifest that can be made out stays, whatever it says.
- Where name and manifest of a directory do not agree on a namespace nothing is touched: it may be somebody
  else's directory, or one that was renamed.

What the storage cannot read is left alone, and so is everything sound.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from .backends.layout import MANIFEST, is_namespace
from .errors import ConfigError
from .scan import STALE_AFTER, Finding, Space, Status, check_again, is_torn, scan

__all__ = ["Action", "Cursor", "Deed", "Pace", "repair"]

#: Seconds of work that a kill may lose.
_SAVE_EVERY = 1.0


class Deed(StrEnum):
    """What was done about a finding."""

    NOTHING = "nothing"  # nothing had to be
    QUARANTINED = "quarantined"  # moved aside
    REMOVED = "removed"
    LEFT = "left"  # someone has to see to it


class Action(NamedTuple):
    """A finding in the namespace of `directory`, and what was done about it; ``detail`` says why."""

    directory: str
    finding: Finding
    deed: Deed
    detail: str = ""


class Pace:
    """Keeps reading below a rate: a bucket that holds no more than is read at a time.

    Parameters
    ----------
    rate : float
        Bytes per second, more than 0.
    clock, sleep : callable
        Monotonic seconds, and a way to wait for some.
    """

    def __init__(
        self,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if rate <= 0:
            raise ValueError(f"a rate is more than 0 bytes per second, not {rate:g}")
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    def __call__(self, size: int) -> None:
        """Wait until `size` bytes more may be read."""
        now = self._clock()
        if self._due > now:
            self._sleep(self._due - now)
        self._due = max(self._due, now) + size / self._rate


class Cursor:
    """How far a scan has come, in a file, so that the next one goes on from there.

    Parameters
    ----------
    path : path
        Read if it is there; removed when the scan has come to its end.
    url : str
        What is scanned.
    clock : callable
        Monotonic seconds.

    Raises
    ------
    ConfigError
        The file is that of another URL, or no cursor.
    """

    def __init__(
        self, path: str | os.PathLike[str], url: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = Path(path)
        self._url = url
        self._clock = clock
        self._saved = clock()
        self.directory, self.name = self._load()

    def mark(self, directory: str, name: str) -> None:
        """Everything up to the file `name` of a namespace has been dealt with."""
        self.directory, self.name = directory, name
        if self._clock() - self._saved >= _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        temp = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        content = {"url": self._url, "directory": self.directory, "name": self.name}
        temp.write_text(json.dumps(content), encoding="utf-8")
        temp.replace(self._path)
        self._saved = self._clock()

    def finish(self) -> None:
        """The scan is complete."""
        self._path.unlink(missing_ok=True)

    def _load(self) -> tuple[str, str]:
        try:
            content = json.loads(self._path.read_bytes())
            url, directory, name = str(content["url"]), str(content["directory"]), str(content["name"])
        except FileNotFoundError:
            return "", ""
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{self._path} does not say where to go on: name another file") from None
        if url != self._url:
            raise ConfigError(f"{self._path} says where to go on in {url}, not in {self._url}")
        return directory, name


def repair(
    spaces: Iterable[Space],
    *,
    dry_run: bool = False,
    pace: Callable[[int], None] | None = None,
    cursor: Cursor | None = None,
    stale_after: float = STALE_AFTER,
) -> Generator[Action, None, None]:
    """Scan namespaces, and mend what is wrong in them.

    Parameters
    ----------
    spaces : iterable of Space
        As :func:`kvstore.scan.spaces` finds them: in the order of their directories.
    dry_run : bool
        Change nothing; the actions are what would be done.
    pace : callable, optional
        Called with the size of each object before it is read; a :class:`Pace`.
    cursor : Cursor, optional
        Where to begin; kept up to date, also when the iterator is closed or interrupted.
    stale_after : float
        Seconds after which a temporary file is stale.

    Yields
    ------
    Action
        One for each finding, the sound ones too, after the deed.
    """
    try:
        for space in spaces:
            if cursor is not None and space.directory < cursor.directory:
                continue
            resumed = cursor is not None and space.directory == cursor.directory
            after = cursor.name if cursor is not None and resumed else ""
            mender = _Mender(space, dry_run)
            for finding in scan(space, stale_after=stale_after, after=after, pace=pace):
                action = mender.mend(finding)
                if cursor is not None and finding.status is not Status.MANIFEST:  # which comes out of order
                    cursor.mark(space.directory, finding.name)
                yield action
    except BaseException:
        if cursor is not None:
            with suppress(OSError):  # what interrupted the scan is what the caller should see
                cursor.save()
        raise
    if cursor is not None:
        cursor.finish()


class _Mender:
    """Decides about the findings of one namespace, and carries the decisions out."""

    def __init__(self, space: Space, dry_run: bool) -> None:
        self._space = space
        self._dry_run = dry_run
        self._is_ours = is_namespace(space.directory) and (
            space.namespace is not None or self._has_lost_its_manifest()
        )

    def mend(self, finding: Finding) -> Action:
        if not finding.status.is_problem:
            return self._action(finding, Deed.NOTHING)
        if not self._is_ours:
            return self._action(finding, Deed.LEFT, "name and manifest of the directory disagree")
        match finding.status:
            case Status.CORRUPT | Status.FOREIGN:
                return self._quarantine(finding)
            case Status.STALE_TEMP:
                return self._remove(finding)
            case Status.MANIFEST:
                return self._mend_manifest(finding)
            case _:
                return self._action(finding, Deed.LEFT, "look after the storage, then verify again")

    def _quarantine(self, finding: Finding) -> Action:
        if not self._dry_run:
            if finding.key is not None:
                again = check_again(self._space, finding)
                if again is None or again.status is Status.GOOD:
                    return self._action(finding, Deed.NOTHING, "gone or replaced meanwhile")
                if again.status is Status.UNREADABLE:
                    return self._action(finding, Deed.LEFT, again.reason)
            if not self._space.backend.set_aside(finding.name):
                return self._action(finding, Deed.LEFT, "it cannot be moved")
        return self._action(finding, Deed.QUARANTINED, finding.reason)

    def _remove(self, finding: Finding) -> Action:
        if not self._dry_run and not self._space.backend.remove_file(finding.name):
            return self._action(finding, Deed.LEFT, "it cannot be removed")
        return self._action(finding, Deed.REMOVED, finding.reason)

    def _mend_manifest(self, finding: Finding) -> Action:
        manifest = self._space.backend.read_file(MANIFEST)
        if manifest is None:
            return self._action(finding, Deed.LEFT, "a store that opens the namespace writes it")
        if not is_torn(manifest):
            return self._action(finding, Deed.NOTHING, "replaced meanwhile")
        return self._remove(finding)

    def _has_lost_its_manifest(self) -> bool:
        manifest = self._space.backend.read_file(MANIFEST)
        return manifest is None or is_torn(manifest)

    def _action(self, finding: Finding, deed: Deed, detail: str = "") -> Action:
        return Action(self._space.directory, finding, deed, detail)
