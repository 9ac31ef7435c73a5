"""How much memory can still be taken here, and page population that does not hold the GIL."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .errors import NoSpaceError

__all__ = ["Limit", "limits", "populate", "require", "touch"]

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name them
_MADV_POPULATE_WRITE = 23

_CGROUP_FILES = (  # limit, usage, and what precedes the names of the hierarchical figures in memory.stat
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),  # beyond it the kernel stalls whoever allocates
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Limit(NamedTuple):
    """One thing that bounds how much memory this process can take.

    Attributes
    ----------
    name : str
        What it is, as a message should call it.
    free : int
        Bytes that can be taken before it is reached; what the kernel would reclaim from caches is free.
    """

    name: str
    free: int


def require(size: int, what: str, root: Path = Path("/")) -> None:
    """Refuse what does not fit.

    Parameters
    ----------
    size : int
        Bytes of memory that will be taken.
    what : str
        What they are for; the message begins with it.
    root : Path
        Where ``proc`` and ``sys`` are found.

    Raises
    ------
    NoSpaceError
        The tightest of the :func:`limits` leaves less; the message names both figures.
    """
    tightest = min(limits(root), key=lambda limit: limit.free)
    if size > tightest.free:
        raise NoSpaceError(
            f"{what} needs {_mib(size)}, but {tightest.name} leaves {_mib(tightest.free)}; lower the capacity"
        )


def limits(root: Path = Path("/")) -> list[Limit]:
    """Everything that bounds the memory of this process: machine, cgroups (v1 and v2), resource limits."""
    found = [_machine(root)]
    for folder in _memory_cgroups(root):
        found += _cgroup_limits(folder)
    found += _process_limits(root)
    return found


def populate(address: int, length: int, *, write: bool) -> None:
    """Fault in the pages of a shared mapping, without holding the GIL.

    Parameters
    ----------
    address : int
        Page aligned.
    length : int
        Bytes.
    write : bool
        Whether the pages are expected not to exist yet. False is cheaper for those that do: only page tables
        are filled in. Contents stay as they are either way.

    Raises
    ------
    OSError
        The memory cannot be had.
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    if _libc.madvise(address, length, advice) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    touch(address, length)


def touch(address: int, length: int) -> None:
    """Fault in pages by reading a byte of each, for kernels before 5.14.

    It never writes, as others may be writing; it holds the GIL.
    """
    region = (ctypes.c_ubyte * length).from_address(address)
    memoryview(region).cast("B")[:: mmap.PAGESIZE].tobytes()


def _mib(size: int) -> str:
    return f"{size >> 20:,} MiB"


def _read(path: Path) -> str:
    """Content of a kernel file, empty where this kernel has none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _machine(root: Path) -> Limit:
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return Limit("the machine (MemAvailable)", int(fields["MemAvailable"].split()[0]) * 1024)


def _memory_cgroups(root: Path) -> Iterator[Path]:
    """Folders of the cgroups whose memory limits apply: the process's own, and each one above it."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(path)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        where, _, what = line.partition(" - ")
        filesystem, _, options = what.split(" ", 2)
        if filesystem not in paths or (filesystem == "cgroup" and "memory" not in options.split(",")):
            continue
        shown, point = where.split(" ")[3:5]
        yield from _lineage(root / point.lstrip("/"), paths[filesystem], shown)


def _lineage(point: Path, path: PurePosixPath, shown: str) -> Iterator[Path]:
    """The cgroup `path` and those above it, as far as the mount at `point` of the subtree `shown` holds them.

    A container may be told a path of its host's tree, which it cannot see: then its own begins at the mount.
    """
    inside = path.is_relative_to(shown) and ".." not in path.parts
    relative = path.relative_to(shown) if inside else PurePosixPath()
    yield point / relative
    for parent in relative.parents:
        yield point / parent


def _cgroup_limits(folder: Path) -> Iterator[Limit]:
    for limit_file, usage_file, prefix in _CGROUP_FILES:
        limit = _read(folder / limit_file).strip()
        if not limit.isdigit():  # no such file, or "max"
            continue
        used = int(_read(folder / usage_file) or 0)
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
        cache = sum(int(stat.get(prefix + name, 0)) for name in _RECLAIMABLE)
        yield Limit(f"the cgroup's {folder / limit_file}", max(int(limit) - used + cache, 0))


def _process_limits(root: Path) -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        yield Limit("RLIMIT_FSIZE (ulimit -f)", soft)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        mapped = int(_read(root / "proc/self/statm").split()[0]) * mmap.PAGESIZE
        yield Limit("RLIMIT_AS (ulimit -v)", max(soft - mapped, 0))
