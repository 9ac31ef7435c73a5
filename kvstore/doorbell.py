"""A descriptor that one thread makes readable to wake another."""

from __future__ import annotations

import os
import threading

__all__ = ["Doorbell"]


class Doorbell:
    """An eventfd that rings while something waits to be looked at; ringing it twice costs one system call."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.rung = False
        self._lock = threading.Lock()  # the flag and the descriptor change together

    def ring(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if not self.rung:
                self.rung = True
                os.eventfd_write(self.fd, 1)

    def answer(self) -> None:
        """Make it unreadable; whoever answers looks for what has come afterwards, not before."""
        with self._lock:
            if self.rung:
                self.rung = False
                os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor; what nobody holds any longer closes itself."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()
