"""Which errors of storage may pass: the one list that every engine asks."""

from __future__ import annotations

import errno

from ..errors import BackendError

__all__ = ["retryable"]

_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def retryable(error: BaseException) -> bool:
    """Whether the call that raised `error` may succeed when it is made again a little later.

    A full, read-only, forbidden or missing directory stays so for longer than a retry takes; a failure of
    transport, of the device or of a limit that other work frees may pass.

    Parameters
    ----------
    error : BaseException
        What a backend's verb raised.

    Examples
    --------
    >>> retryable(TimeoutError()), retryable(PermissionError())
    (True, False)
    """
    if isinstance(error, BackendError):
        return error.retryable
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING
