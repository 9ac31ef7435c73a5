"""A filesystem around another one, which injects faults: ``fault::file:///mnt/kv`` and the like."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from ...backends.layout import MANIFEST
from .plan import FaultPlan
from .rules import Fault, Rule, Verb, damage, make_error

__all__ = ["FaultFileSystem"]


class FaultFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Does what the next filesystem of the chained URL does, unless a rule has a fault for the call.

    Whole files are the unit: a read of one is a ``get``, whatever calls it takes, writing it a ``put``;
    ``exists`` and ``info`` are ``exists``, listings are ``scan``. The key of a rule is the name of a file up
    to its first dot. Manifests and moves are left alone, so that counts are counts of chunks.

    Parameters
    ----------
    fo : str
        Path below which the files are; fsspec takes it from the URL, and the next two as well.
    target_protocol : str
    target_options : mapping
    rules : iterable of Rule, or of mappings of a rule's fields
    folder, parent : optional
        As for :class:`FaultPlan`; with the folder of a plan, that plan's log and end are shared.

    Examples
    --------
    >>> fs, _ = fsspec.url_to_fs("fault::memory://doctest", rules=[{"fault": "EIO", "verb": "get"}])
    >>> fs.pipe_file("file", b"content")
    >>> fs.cat_file("file")
    Traceback (most recent call last):
    OSError: [Errno 5] Input/output error (injected)
    """

    protocol = "fault"
    cachable = False

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        *,
        rules: Iterable[Rule | Mapping[str, Any]] = (),
        folder: str | None = None,
        parent: int | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        if target_protocol is None:
            raise ValueError("fault:: goes in front of another filesystem, as in fault::file:///mnt/kv")
        inner = fsspec.filesystem(target_protocol, **(target_options or {}))
        self.fs = DirFileSystem(path=fo, fs=inner)
        self.plan = FaultPlan(rules, folder, parent=parent)

    # Reading.

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is something at `path`."""
        self._meet("exists", path)
        return bool(self.fs.exists(path, **kwargs))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Facts about `path`."""
        self._meet("exists", path)
        return dict(self.fs.info(path, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What is in a directory."""
        self._meet("scan", path)
        return list(self.fs.ls(path, detail=detail, **kwargs))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Content of a file; faults of data harm the whole file, and the range is cut from that."""
        fault = self._meet("get", path)
        if fault is Fault.VANISH:
            self.fs.rm_file(path)
        if fault in (None, Fault.VANISH):
            return bytes(self.fs.cat_file(path, start=start, end=end, **kwargs))
        return damage(fault, self.fs.cat_file(path))[start:end]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """A file; one that is to be harmed is kept in memory meanwhile."""
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if mode == "rb":
            return self._open_to_read(path, kwargs)
        file = self.fs.open(path, mode, **kwargs)  # before it counts as a put: there may be no directory
        try:
            fault = self._meet("put", path)
        except BaseException:
            file.close()
            raise
        return file if fault is None else _Harmed(file, fault)

    def _open_to_read(self, path: str, kwargs: dict[str, Any]) -> Any:
        fault = self._meet("get", path)
        if fault is Fault.VANISH:
            self.fs.rm_file(path)
        if fault in (None, Fault.VANISH):
            return self.fs.open(path, "rb", **kwargs)
        return io.BytesIO(damage(fault, self.fs.cat_file(path)))

    # Writing.

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file."""
        fault = self._meet("put", path)
        harmed = value if fault is None else damage(fault, bytes(value))
        self.fs.pipe_file(path, harmed, mode=mode, **kwargs)
        _raise_after(fault)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self._meet("delete", path)
        self.fs.rm_file(path)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Move a file; never harmed."""
        self.fs.mv(path1, path2, **kwargs)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory and those above it; never harmed."""
        self.fs.makedirs(path, exist_ok=exist_ok)

    def _meet(self, verb: Verb, path: str) -> Fault | None:
        name = path.rpartition("/")[2]
        return None if name == MANIFEST else self.plan.meet(verb, [name.partition(".")[0]])


class _Harmed(io.BytesIO):
    """Collects what is written, and stores what a fault leaves of it when it is closed."""

    def __init__(self, file: Any, fault: Fault) -> None:
        super().__init__()
        self._file = file
        self._fault = fault

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        with self._file as file:
            file.write(damage(self._fault, data))
        _raise_after(self._fault)


def _raise_after(fault: Fault | None) -> None:
    if fault is Fault.SHORT_WRITE:
        raise make_error(Fault.ENOSPC)
