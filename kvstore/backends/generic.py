"""Objects on any fsspec filesystem.

Two rules choose the calls, by what the filesystem is:

- *Reading*. Where files are local (``local_file``: the local filesystem and whole-file caches),
  ``open().readinto`` fills the buffers with no copy in between. Elsewhere ``cat_file(start, end)`` makes
  one ranged request and the bytes are copied once; a file object would add requests, and buffers of its
  own.
- *Writing*. Asynchronous filesystems are object stores: an object appears whole, and
  ``pipe_file(mode="create")`` asks for the condition that it be new. Elsewhere the object is written to a
  temporary name and moved, after a look whether the name is free: of writers at the same moment the last
  one's bytes stay.

The filesystem is built by :meth:`GenericBackend.open`, in the worker that uses it: instances survive
neither a fork nor a second event loop. Instances and listings are not cached, since both would go stale
when others write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import fsspec
from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from .. import frame
from .base import BackendContext, Capabilities
from .files import FileBackend
from .layout import MANIFEST, Entry, aside_name, classify, follows, is_namespace, object_name, temp_name

__all__ = ["GenericBackend", "namespaces"]

_MTIME_FIELDS = ("mtime", "LastModified", "last_modified", "modified", "created")


class GenericBackend(FileBackend):
    """One namespace below a URL that fsspec understands.

    Parameters
    ----------
    context : BackendContext
    url : str
        Root of the tier; may be chained (``simplecache::file:///mnt/kv``).
    directory : str
        Name of the namespace below it.
    storage_options : mapping
        Arguments of the filesystem; for a chained URL, those of a link under its protocol, as fsspec has it.
    """

    capabilities = Capabilities(quarantine=True)

    def __init__(
        self,
        context: BackendContext,
        url: str,
        directory: str,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(context)
        self._url = url
        self._directory = directory
        self._options = dict(storage_options or {})

    def attach(self) -> None:
        """Build the filesystem."""
        self._fs, root = _filesystem(self._url, self._options)
        self._root = _join(root, self._directory)
        self._reads_in_place = bool(getattr(type(self._fs), "local_file", False))
        self._puts_whole = bool(_innermost(self._fs).async_impl)
        self.capabilities = Capabilities(
            atomic_create=self._puts_whole or isinstance(_innermost(self._fs), LocalFileSystem),
            quarantine=True,
            shared=not _is_private(self._url),
        )

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an object."""
        return [self._fs.exists(self._path(object_name(key))) for key in keys]

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Read a file into the buffers; see the rules at the top of this file."""
        path = self._path(object_name(key))
        try:
            if self._reads_in_place:
                return self._read_in_place(path, header, payload)
            # Padding, or one byte too many, tells the size as far as it matters.
            limit = header.nbytes + payload.nbytes + frame.ALIGNMENT
            data = memoryview(self._fs.cat_file(path, start=0, end=limit))
        except FileNotFoundError:
            return None
        head, body = data[: header.nbytes], data[header.nbytes :][: payload.nbytes]
        header[: len(head)] = head
        payload[: len(body)] = body
        return len(data)

    def _read_in_place(self, path: str, header: memoryview, payload: memoryview) -> int:
        with self._fs.open(path, "rb") as file:
            size = _fill(file, header)
            if size == header.nbytes:
                size += _fill(file, payload) + len(file.read(frame.ALIGNMENT))
        return size

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        """Create a file from the buffers; see the rules at the top of this file."""
        return self._create(object_name(key), [header, payload])

    def _create(self, name: str, buffers: list[memoryview]) -> bool:
        path = self._path(name)
        if self._fs.exists(path):
            return False
        if not self._puts_whole:
            self._write_and_move(path, buffers)
            return True
        try:
            self._fs.pipe_file(path, b"".join(buffers), mode="create")
        except FileExistsError:
            return False
        return True

    def _write_and_move(self, path: str, buffers: list[memoryview]) -> None:
        temp = temp_name(path)
        try:
            try:
                self._write(temp, buffers)
            except FileNotFoundError:
                with suppress(OSError):  # some clients fail when another writer is faster: then it is there
                    self._fs.makedirs(temp.rpartition("/")[0], exist_ok=True)
                self._write(temp, buffers)
            self._fs.mv(temp, path)
        except BaseException:
            self._remove(temp)
            raise

    def _write(self, path: str, buffers: list[memoryview]) -> None:
        with self._fs.open(path, "wb") as file:
            for buffer in buffers:
                file.write(buffer)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove the files of `keys`."""
        for key in keys:
            try:
                self._fs.rm_file(self._path(object_name(key)))
            except FileNotFoundError:
                pass

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except Exception:  # another error is on its way to the caller
            pass

    def set_aside(self, name: str) -> bool:
        """Move a file into ``quarantine/``; False where that fails, or where it was sound."""
        aside = aside_name(name)
        try:
            if not self._puts_whole:
                self._fs.makedirs(self._path(aside).rpartition("/")[0], exist_ok=True)
            self._fs.mv(self._path(name), self._path(aside))
        except OSError:
            return False
        return not self._put_back(aside, name)

    def _put_back(self, aside: str, name: str) -> bool:
        """Give a sound object its name again, unless the name is taken by now; False of any other file."""
        try:
            data = self.read_file(aside)
            if data is None or not self.is_sound(name, data):
                return False
            if self._fs.exists(self._path(name)):
                self._fs.rm_file(self._path(aside))
            else:
                self._fs.mv(self._path(aside), self._path(name))
        except OSError:
            return False
        return True

    def remove_file(self, name: str) -> bool:
        """Remove a file; False where that fails."""
        try:
            self._fs.rm_file(self._path(name))
        except OSError:
            return False
        return True

    def entries(self, after: str = "") -> Iterator[Entry]:
        """Every file below the namespace; one listing for each directory."""
        pending: list[tuple[str, dict[str, Any]]] = [("", {"type": "directory"})]
        while pending:
            name, info = pending.pop()
            if info["type"] == "directory":
                below = (item for item in self._list(name) if follows(item[0], after))
                pending.extend(sorted(below, key=_name_of, reverse=True))
                continue
            kind, key = classify(name)
            yield Entry(name, kind, key, int(info.get("size") or 0), _mtime(info))

    def _list(self, directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and details of what is in a directory; nothing when it vanished meanwhile."""
        path = _join(self._root, directory)
        try:
            listing = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return
        for info in listing:
            name = _last_part(info)
            if info["name"].strip("/") != path.strip("/"):  # object stores list a directory's own marker
                yield _join(directory, name), info

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file."""
        return _cat(self._fs, self._path(name))

    def create_file(self, name: str, data: bytes) -> bool:
        """Create a file in the way that objects are created."""
        return self._create(name, [memoryview(data)])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def namespaces(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, bytes | None]]:
    """Directory and manifest (None where absent) of each namespace below `url`.

    Raises
    ------
    OSError
        `url` cannot be listed.
    """
    fs, root = _filesystem(url, dict(storage_options or {}))
    directories = [info for info in fs.ls(root, detail=True) if info["type"] == "directory"]
    for name in sorted(map(_last_part, directories)):
        manifest = _cat(fs, _join(root, f"{name}/{MANIFEST}"))
        if manifest is not None or is_namespace(name):
            yield name, manifest


def _filesystem(url: str, options: dict[str, Any]) -> tuple[fsspec.AbstractFileSystem, str]:
    """A filesystem of our own and the root in it, with listing caches off in every link of a chain."""
    links = [split_protocol(link)[0] or link for link in url.split("::")]
    fresh = {"skip_instance_cache": True}
    nested = {link: {**fresh, **options.pop(link, {})} for link in links[1:]}
    fs, root = url_to_fs(url, **fresh, **options, **nested)
    if isinstance(fs, DirFileSystem):  # it would put the path in front of every path, the root's own included
        fs, root = fs.fs, fs.path
    for link in _chain(fs):  # as an option, some would hand it on to their clients
        link.dircache.use_listings_cache = False
    return fs, root.rstrip("/")


def _chain(fs: fsspec.AbstractFileSystem) -> Iterator[fsspec.AbstractFileSystem]:
    """`fs` and the filesystems inside it."""
    while fs is not None:
        yield fs
        # Caching filesystems answer for the one inside in ordinary attribute access.
        fs = object.__getattribute__(fs, "__dict__").get("fs")


def _innermost(fs: fsspec.AbstractFileSystem) -> fsspec.AbstractFileSystem:
    """The last filesystem of a chain, which decides how objects come into being."""
    *_, last = _chain(fs)
    return last


def _is_private(url: str) -> bool:
    """Whether the objects are in the memory of this process."""
    return bool(split_protocol(url.split("::")[-1])[0] == "memory")


def _last_part(info: Mapping[str, Any]) -> str:
    return str(info["name"]).rstrip("/").rpartition("/")[2]


def _name_of(item: tuple[str, dict[str, Any]]) -> str:
    return item[0]


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _cat(fs: fsspec.AbstractFileSystem, path: str) -> bytes | None:
    try:
        return bytes(fs.cat_file(path))
    except FileNotFoundError:
        return None


def _fill(file: Any, view: memoryview) -> int:
    """Read until `view` is full or the file ends."""
    done = 0
    while done < view.nbytes and (count := file.readinto(view[done:])):
        done += count
    return done


def _mtime(info: Mapping[str, Any]) -> float:
    """Seconds since the epoch; filesystems disagree on the field's name and type."""
    for field in _MTIME_FIELDS:
        value = info.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
