"""Three ways to give a finished temporary file its name, from the best to the one that works everywhere.

Each takes ``(temp, target)`` and says whether this call created `target`. `temp` may still be there
afterwards. The first two never replace a `target` that exists.
"""

# ruff: noqa: PTH104, PTH116 - system calls by their names

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache

__all__ = ["UNSUPPORTED", "link", "rename_after_look", "rename_noreplace"]

UNSUPPORTED = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EINVAL, errno.EXDEV}
)
"""With these numbers a file system says that it does not know an operation."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def link(temp: str, target: str) -> bool:
    """By a hard link; the usual way, and atomic over NFS too."""
    try:
        os.link(temp, target)
    except FileExistsError:
        # A lost reply makes an NFS client repeat the request, and the repetition finds our own link.
        return os.stat(temp).st_nlink > 1
    return True


def rename_noreplace(temp: str, target: str) -> bool:
    """By ``renameat2(RENAME_NOREPLACE)``, for file systems without hard links."""
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
    if call(_AT_FDCWD, os.fsencode(temp), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    raise OSError(number, os.strerror(number), target)


def rename_after_look(temp: str, target: str) -> bool:
    """By a look and a plain rename: of writers at the same moment the last one's bytes stay, whole."""
    if os.path.lexists(target):
        return False
    os.rename(temp, target)
    return True


@cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    """The C library's function; None where it has none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
