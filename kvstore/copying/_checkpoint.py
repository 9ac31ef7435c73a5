"""How far a copy has come, in a file that outlives a kill."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ._crew import Copied

__all__ = ["Checkpoint"]

#: Seconds of work that a kill may make the next copy look at again.
_SAVE_EVERY = 1.0


class _State(msgspec.Struct):
    source: str
    target: str
    namespace: str | None
    directory: str = ""
    name: str = ""
    done: Copied = Copied()


class Checkpoint:
    """The place up to which everything has been copied, and the counts so far.

    A context manager: the file is there, and written anew now and then, until the block ends without an
    exception.

    Parameters
    ----------
    path : path
        Read if it is there.
    source, target : str
        URLs.
    namespace : str or None
        As it is wanted.

    Raises
    ------
    ConfigError
        The file is that of another copy, or none of ours.
    OSError
        It cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], source: str, target: str, namespace: str | None) -> None:
        self._path = Path(path)
        self._state = _State(source, target, namespace)
        self._load()
        self._save()

    @property
    def directory(self) -> str:
        """Directory of the namespace that is being copied; empty at the start."""
        return self._state.directory

    @property
    def name(self) -> str:
        """Name of the last object in it that was dealt with."""
        return self._state.name

    @property
    def done(self) -> Copied:
        """Counts of this copy and those that it goes on with."""
        return self._state.done

    def mark(self, directory: str, name: str, done: Copied) -> None:
        """Everything up to the object `name` of a namespace has been dealt with."""
        self._state.directory, self._state.name, self._state.done = directory, name, done
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            self._save()

    def __enter__(self) -> Checkpoint:
        """Nothing to do."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the file; after an exception, bring it up to date."""
        if kind is None:
            self._path.unlink(missing_ok=True)
        else:
            with suppress(OSError):  # what ended the copy is what the caller should see
                self._save()

    def _save(self) -> None:
        """Write the file, whole or not at all."""
        temp = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temp.write_bytes(msgspec.json.encode(self._state))
        temp.replace(self._path)
        self._saved = time.monotonic()

    def _load(self) -> None:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_State)
        except FileNotFoundError:
            return
        except msgspec.MsgspecError:
            raise ConfigError(f"{self._path} does not say where to go on: name another file") from None
        wanted = self._state
        for field in ("source", "target", "namespace"):
            theirs, ours = getattr(found, field), getattr(wanted, field)
            if theirs != ours:
                raise ConfigError(f"{self._path} is of a copy with {field} {theirs!r}, not {ours!r}")
        self._state = found
