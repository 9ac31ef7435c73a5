"""Objects as files of a local or network-mounted directory, moved by ``preadv`` and ``pwritev``.

How an object is written:

1. Look: when the name is taken, the first writer has won, and nothing is written.
2. Create a temporary file beside the name, exclusively, under a name that no other writer uses.
3. Write header, payload and zeros up to a multiple of 4096 bytes; a header that has to wait for the digest
   of a long payload comes last.
4. Sync the file (``durability`` of ``data``: its content; of ``full``: its metadata too).
5. Close it; over NFS only this tells whether the server has taken the bytes.
6. Link it to its name, which fails if the name is taken by now: one writer wins, and a name always stands
   for a whole object. (File systems without hard links: see :mod:`kvstore.backends.publish`.)
7. Unlink the temporary name.
8. Sync the directory (``durability=full``).

A writer that dies leaves at most a temporary file, which the scanner finds by its age. Directories are made
when step 2 misses them, so that a tree that was deleted by someone else grows again, but nothing above its
root, which may be the place of a file system that has been unmounted. Nothing is cached between calls but
strings; a backend may be used by several threads.

The usual case is also done by the compiled part (:mod:`kvstore.backends.compiled`), to the same end.
"""

# ruff: noqa: PTH104, PTH116 - system calls by their names

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from .. import frame
from . import publish
from ._directories import check_direct_io, current_umask, leave_direct_io, make_directories, walk
from .base import BackendContext, Capabilities
from .files import FileBackend
from .layout import MANIFEST, Entry, aside_name, is_namespace, temp_name

__all__ = ["STAMP_EVERY", "PosixBackend", "namespaces"]

_ZEROS = memoryview(mmap.mmap(-1, frame.ALIGNMENT)).toreadonly()
_TAIL = memoryview(mmap.mmap(-1, frame.ALIGNMENT))  # written by all, read by nobody
_PIECE = 512 << 10  # bytes: with its pages in the page cache it fits the cache of a core; smaller costs calls
STAMP_EVERY = 60.0
"""Seconds: the precision of "last used"."""

_PUBLISHERS = (publish.link, publish.rename_noreplace, publish.rename_after_look)


class PosixBackend(FileBackend):
    """One namespace in a directory.

    Parameters
    ----------
    context : BackendContext
    path : str
        Directory of the namespace, ``<root>/<fingerprint>``; made by :meth:`open`, with its parents.
    durability : {"none", "data", "full"}
        What is synced before an object gets its name: nothing, its content, or everything and the directory.
    direct : {"auto", "on", "off"}
        Whether objects bypass the page cache. ``auto`` does not (``docs/reference/backends.md`` has the
        figures); ``on`` does where the file system can.
    mode : int
        Permission bits of files, whatever the umask at the time of construction says; directories get the
        matching search bits.
    stamp : bool
        Whether an object that is read gets a new time of modification, which then says when it was last used;
        at most once a minute, and only after :meth:`open`.
    """

    capabilities = Capabilities(atomic_create=True, first_writer_wins=True, quarantine=True)

    def __init__(
        self,
        context: BackendContext,
        path: str,
        *,
        durability: Literal["none", "data", "full"] = "none",
        direct: Literal["auto", "on", "off"] = "auto",
        mode: int = 0o600,
        stamp: bool = True,
    ) -> None:
        super().__init__(context)
        self.path = os.path.abspath(path)
        self._durability = durability
        self._wants_direct = direct == "on"
        self._direct = 0
        self._mode = mode
        self._directory_mode = mode | (mode & 0o444) >> 2
        self._masked = mode & current_umask() != 0
        self._publisher = 0
        self._wants_stamps = stamp
        self._stamps = False

    # Reading.

    def open(self) -> None:
        """Make the root of the tier, and what is missing above it; go on as the base does, and see whether
        direct I/O works here, if it is asked for."""
        make_directories(os.path.dirname(self.path), self._directory_mode)
        super().open()
        self._stamps = self._wants_stamps
        if self._wants_direct and check_direct_io(self.path):
            self._direct = os.O_DIRECT
            self.capabilities = replace(self.capabilities, direct_io=True)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an object: one ``stat`` each."""
        return [_is_there(self._object_path(key)) for key in keys]

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        """As the base does; a large payload is hashed piece by piece, each while the processor's cache has
        it."""
        if out.nbytes <= _PIECE or self._direct:
            return super().read_into(key, out)
        header, running = self._scratch.header, frame.RunningDigest()
        size = self._read(key, header, out, running)
        if size is None:
            return None
        return frame.verify(
            header, out, size, key=key, fingerprint=self.context.fingerprint, digest=running.digest()
        )

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Scatter a file into the buffers: ``open``, one ``preadv``, ``close``."""
        return self._read(key, header, payload, None)

    def _read(
        self, key: bytes, header: memoryview, payload: memoryview, running: frame.RunningDigest | None
    ) -> int | None:
        try:
            fd = os.open(self._object_path(key), os.O_RDONLY | self._direct_flag(payload))
        except FileNotFoundError:
            return None
        try:
            if running is None:
                # Padding of a full chunk, or one byte too many, goes to the tail: so the size costs no call.
                size = self._scatter(fd, [header, payload, _TAIL], header)
            else:
                size = self._scatter_pieces(fd, header, payload, running)
            if self._stamps and time.time() - os.fstat(fd).st_mtime > STAMP_EVERY:
                _stamp(fd)
            return size
        finally:
            os.close(fd)

    def _scatter_pieces(
        self, fd: int, header: memoryview, payload: memoryview, running: frame.RunningDigest
    ) -> int:
        """Fill the buffers, and hash what the header announces of the payload."""
        size = self._scatter(fd, [header, payload[:_PIECE]], header)
        left = frame.announced_length(header)
        running.update(payload[: min(left, _PIECE)])
        for start in range(_PIECE, payload.nbytes, _PIECE):
            if size < frame.HEADER_SIZE + start:
                break
            piece = payload[start : start + _PIECE]
            buffers = [piece] if start + _PIECE < payload.nbytes else [piece, _TAIL]
            size += self._scatter(fd, buffers, header, size)
            left -= _PIECE
            running.update(piece if left >= _PIECE else piece[: max(0, left)])
        return size

    def _scatter(self, fd: int, buffers: Sequence[memoryview], header: memoryview, start: int = 0) -> int:
        """Fill `buffers` with what follows byte `start`, less if that is all of the object; returns how
        much."""
        try:
            done = os.preadv(fd, buffers, start)
        except OSError as error:
            self._forgive_misalignment(error)
            done = 0
        if done < sum(map(len, buffers)) and not frame.is_whole(header, start + done):
            done += self._scatter_rest(fd, buffers, start, done)
        return done

    def _scatter_rest(self, fd: int, buffers: Sequence[memoryview], start: int, done: int) -> int:
        """Go on after a short read until there is no more, through the page cache: alignment is lost."""
        rest = _after(buffers, done)
        if rest and self._direct:
            leave_direct_io(fd)
        more = 0
        while rest:
            count = os.preadv(fd, rest, start + done + more)
            if not count:
                break
            more += count
            rest = _after(rest, count)
        return more

    # Writing, by the steps at the top of this file.

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        """Create a file from the buffers: ``access, open, pwritev, close, link, unlink``."""
        target = self._object_path(key)
        if os.access(target, os.F_OK):
            return False
        padding = -payload.nbytes % frame.ALIGNMENT
        buffers = [header, payload, _ZEROS[:padding]] if padding else [header, payload]
        return self._write_file(target, buffers, self._direct_flag(payload))

    def _write_file(self, target: str, buffers: Sequence[memoryview], flags: int = 0) -> bool:
        temp = temp_name(target)
        fd = self._create_temp(temp, flags)
        try:
            try:
                self._gather(fd, buffers)
                self._sync_file(fd)
            finally:
                os.close(fd)
            created = self._publish(temp, target)
        finally:
            self._unlink_temp(temp)
        self._sync_directory(target)
        return created

    def _create_temp(self, temp: str, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(temp, flags, self._mode)
        except FileNotFoundError:
            self._make_directories(os.path.dirname(temp))
            fd = os.open(temp, flags, self._mode)
        if self._masked:
            os.fchmod(fd, self._mode)
        return fd

    def _gather(self, fd: int, buffers: Sequence[memoryview]) -> None:
        total = sum(map(len, buffers))
        try:
            done = os.pwritev(fd, buffers, 0)
        except OSError as error:
            self._forgive_misalignment(error)
            done = 0
        if done < total:
            leave_direct_io(fd)
        while done < total:
            done += os.pwritev(fd, _after(buffers, done), done)

    def _sync_file(self, fd: int) -> None:
        if self._durability == "data":
            os.fdatasync(fd)
        elif self._durability == "full":
            os.fsync(fd)

    def _publish(self, temp: str, target: str) -> bool:
        last = len(_PUBLISHERS) - 1
        for index in range(self._publisher, last):
            try:
                created = _PUBLISHERS[index](temp, target)
            except OSError as error:
                if error.errno not in publish.UNSUPPORTED:
                    raise
            else:
                self._publisher = index
                return created
        created = _PUBLISHERS[last](temp, target)
        self._publisher = last
        self.capabilities = replace(self.capabilities, first_writer_wins=False)
        return created

    def _unlink_temp(self, temp: str) -> None:
        try:
            os.unlink(temp)
        except OSError:  # renamed, or gone with its directory; what stays is swept by age
            pass

    def _sync_directory(self, name: str) -> None:
        """Sync the directory of `name`."""
        if self._durability != "full":
            return
        fd = os.open(os.path.dirname(name), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _make_directories(self, path: str) -> None:
        ground = os.path.dirname(os.path.dirname(self.path))
        for made in make_directories(path, self._directory_mode, ground):
            self._sync_directory(made)

    # The rest.

    def delete(self, keys: Sequence[bytes]) -> None:
        """Unlink the files of `keys`."""
        for key in keys:
            try:
                os.unlink(self._object_path(key))
            except FileNotFoundError:
                pass

    def set_aside(self, name: str) -> bool:
        """Rename a file into ``quarantine/``; False where it is gone, was sound, or the directory is
        read-only."""
        aside = aside_name(name)
        try:
            self._make_directories(os.path.dirname(f"{self.path}/{aside}"))
            os.rename(f"{self.path}/{name}", f"{self.path}/{aside}")
        except OSError:
            return False
        return not self._put_back(aside, name)

    def _put_back(self, aside: str, name: str) -> bool:
        """Give a sound object its name again, unless the name is taken by now; False of any other file."""
        try:
            data = self.read_file(aside)
            if data is None or not self.is_sound(name, data):
                return False
            self._publish(f"{self.path}/{aside}", f"{self.path}/{name}")
        except OSError:
            return False
        self._unlink_temp(f"{self.path}/{aside}")
        return True

    def remove_file(self, name: str) -> bool:
        """Unlink a file; False where it is gone or the directory is read-only."""
        try:
            os.unlink(f"{self.path}/{name}")
        except OSError:
            return False
        return True

    def entries(self, after: str = "") -> Iterator[Entry]:
        """Every file below the directory of the namespace."""
        return walk(self.path, after)

    def read_file(self, name: str) -> bytes | None:
        """Content of a file below the directory of the namespace."""
        return _read_small(f"{self.path}/{name}")

    def create_file(self, name: str, data: bytes) -> bool:
        """Create a file in the way that objects are created."""
        target = f"{self.path}/{name}"
        return not os.access(target, os.F_OK) and self._write_file(target, [memoryview(data)])

    def _object_path(self, key: bytes) -> str:
        digits = key.hex()
        return f"{self.path}/{digits[:2]}/{digits}.kv"

    def _forgive_misalignment(self, error: OSError) -> None:
        """Go on when the file system refuses a direct transfer as it is: the page cache takes any."""
        if not self._direct or error.errno != errno.EINVAL:
            raise error

    def _direct_flag(self, payload: memoryview) -> int:
        return 0 if payload.nbytes % frame.ALIGNMENT else self._direct


def namespaces(root: str) -> Iterator[tuple[str, bytes | None]]:
    """Directory and manifest (None where absent) of each namespace under `root`.

    Raises
    ------
    OSError
        `root` cannot be listed.
    """
    with os.scandir(root) as found:
        names = sorted(entry.name for entry in found if entry.is_dir())
    for name in names:
        manifest = _read_small(f"{root}/{name}/{MANIFEST}")
        if manifest is not None or is_namespace(name):
            yield name, manifest


def _stamp(fd: int) -> None:
    """Note that a file is used, where that is allowed: by its owner, or by those who may write it."""
    try:
        os.utime(fd)
    except OSError:
        pass


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _read_small(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The part of `buffers` that follows their first `done` bytes."""
    rest = []
    for buffer in buffers:
        if done < buffer.nbytes:
            rest.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return rest
