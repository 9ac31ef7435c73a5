"""Addresses of peers: where to listen, and where to connect."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["Address"]


class Address(NamedTuple):
    """Host and port of TCP.

    Examples
    --------
    >>> str(Address.parse(":5710")), str(Address.parse("tcp://[::1]:5710"))
    ('tcp://127.0.0.1:5710', 'tcp://[::1]:5710')
    >>> Address.parse("0.0.0.0:5710").is_loopback
    False
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From ``tcp://host:port`` or ``host:port``; without a host it is the loopback interface.

        Raises
        ------
        ValueError
            It is neither.
        """
        parts = urlsplit(text if "://" in text else f"tcp://{text}")
        extra = parts.path or parts.query or parts.fragment or parts.username or parts.password
        if parts.scheme != "tcp" or parts.port is None or extra:
            raise ValueError(f"not an address: {text!r}; write host:port")
        return cls(parts.hostname or "127.0.0.1", parts.port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        """As ``tcp://host:port``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"
