"""What the POSIX backend needs of directories: making, walking and trying them."""

# ruff: noqa: PTH101, PTH102, PTH112, PTH208 - system calls by their names

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator

from .. import frame
from .layout import Entry, classify, follows, temp_name

__all__ = ["check_direct_io", "current_umask", "leave_direct_io", "make_directories", "walk"]


def current_umask() -> int:
    """The umask of this process, read without the moment of change that ``os.umask`` needs."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o777  # an old kernel does not tell: assume that everything is masked


def make_directories(path: str, mode: int, ground: str = "/") -> list[str]:
    """Make `path` and what is missing above it, with `mode` whatever the umask.

    Parameters
    ----------
    path : str
    mode : int
        Permission bits.
    ground : str
        Neither it nor anything above it is made.

    Returns
    -------
    list of str
        What was made, outermost first.

    Raises
    ------
    FileNotFoundError
        `ground` is not there.
    """
    missing = []
    while not os.path.isdir(path):
        if path == ground:
            why = "what the tier lay in has gone; mount it, or make it with mkdir -p"
            raise FileNotFoundError(errno.ENOENT, why, ground)
        missing.append(path)
        path = os.path.dirname(path)
    made = []
    for directory in reversed(missing):
        try:
            os.mkdir(directory, mode)
        except FileExistsError:
            continue  # another writer's
        os.chmod(directory, mode)
        made.append(directory)
    return made


def walk(root: str, after: str = "") -> Iterator[Entry]:
    """Every file below `root` that follows `after`, in the order of names; in memory are the names of one
    path of directories.

    What vanishes meanwhile is left out. Symbolic links are not followed.
    """
    pending = [""]
    while pending:
        name = pending.pop()
        path = f"{root}/{name}" if name else root
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                below = (f"{name}/{child}" if name else child for child in os.listdir(path))
                pending.extend(sorted((child for child in below if follows(child, after)), reverse=True))
                continue
        except FileNotFoundError:
            continue
        kind, key = classify(name)
        yield Entry(name, kind, key, status.st_size, status.st_mtime)


def check_direct_io(directory: str) -> bool:
    """Whether a file in `directory` can be written and read without the page cache."""
    path = temp_name(f"{directory}/direct-io")
    page = memoryview(mmap.mmap(-1, frame.ALIGNMENT))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return os.pwrite(fd, page, 0) == len(page) == os.preadv(fd, [page], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
        os.unlink(path)


def leave_direct_io(fd: int) -> None:
    """Let a descriptor use the page cache from now on, which asks for no alignment."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
