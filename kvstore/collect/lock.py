"""Locks between processes and machines that share a directory: ``flock``, which the kernel frees at death.

Over NFS the client turns it into a lock of the server; Lustre needs the mount option ``flock``. A lock file
that somebody deletes (with its directory, say) is made again: whoever locks looks whether the name still
stands for what it has locked.
"""

# ruff: noqa: PTH116 - system calls by their names

from __future__ import annotations

import fcntl
import os
import time

__all__ = ["FileLock"]

#: Seconds between two attempts.
_PAUSE = 0.002


class FileLock:
    """An exclusive lock; one object is one holder.

    Parameters
    ----------
    path : str
        The file, made when it is first locked; its directory must be there.
    mode : int
        Permission bits of the file.
    """

    def __init__(self, path: str, mode: int = 0o600) -> None:
        self.path = path
        self._mode = mode
        self._fd = -1

    @property
    def held(self) -> bool:
        """Whether this object has the lock, by a file that is still there."""
        return self._fd >= 0 and _stands_for(self.path, self._fd)

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lock, within `timeout` seconds; False when somebody else has it.

        Raises
        ------
        OSError
            The file cannot be opened, or its file system has no locks.
        """
        if self.held:
            return True
        self.release()
        deadline = time.monotonic() + timeout
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def release(self) -> None:
        """Let go, for forked copies of this process as well."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Delete the file, if this object has it locked, and let go."""
        if self.held:
            os.unlink(self.path)
        self.release()

    def _try(self) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        if not _stands_for(self.path, fd):
            os.close(fd)
            return False
        self._fd = fd
        return True


def _stands_for(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
