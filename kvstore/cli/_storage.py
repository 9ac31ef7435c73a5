"""Errors of storage as commands word them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BackendError, KVStoreError

__all__ = ["explain", "naming"]

_REMEDIES = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check the path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "see who may read and write there"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, for example with kvstore prune"),
}
_USUAL_REMEDY = "look after the storage, then run the command again"


def explain(error: OSError, place: str = "") -> str:
    """Where something failed, what, and what to do; `place` is for an error that names no file."""
    where = error.filename or place
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, _USUAL_REMEDY)
    return f"{where}: {what}; {remedy}" if where else f"{what}; {remedy}"


@contextmanager
def naming(place: str) -> Iterator[None]:
    """A block whose errors of storage are those of a `place`.

    Raises
    ------
    BackendError
        In place of an error of the operating system, or of a client.
    """
    try:
        yield
    except KVStoreError:
        raise
    except OSError as error:
        raise BackendError(explain(error, place)) from error
