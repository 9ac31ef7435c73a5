"""Addresses of peers: where to listen, and where to connect."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["Address", "is_allowed", "read_hosts"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9_-]*[a-z0-9])?)*\.?")
_WORDS = ("any", "loopback")


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
        return is_allowed(self.host, ("loopback",))

    def __str__(self) -> str:
        """As ``tcp://host:port``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def read_hosts(patterns: Iterable[str]) -> tuple[str, ...]:
    """Check `patterns` for :func:`is_allowed`, and bring them into their normal form.

    Raises
    ------
    ValueError
        One is neither a name, a ``*.domain``, an address, a network, ``loopback`` nor ``any``.
    """
    return tuple(_read_pattern(pattern) for pattern in patterns)


def is_allowed(host: str, patterns: Iterable[str]) -> bool:
    """Whether `host`, a name or an address, matches one of `patterns`; no name is looked up, and an address
    with a scope matches nothing.

    Examples
    --------
    >>> is_allowed("10.0.3.7", ("10.0.0.0/16",)), is_allowed("10.1.0.7", ("10.0.0.0/16",))
    (True, False)
    >>> is_allowed("node-3.gpu.svc", ("*.gpu.svc",)), is_allowed("127.0.0.1", ("loopback",))
    (True, True)
    """
    name, address = host.lower().rstrip("."), _address(host)
    if address is None and not _NAME.fullmatch(name):
        return False
    return any(_matches(pattern, name, address) for pattern in patterns)


def _read_pattern(pattern: object) -> str:
    text = pattern.strip().lower() if isinstance(pattern, str) else ""
    if text in _WORDS or _NAME.fullmatch(text.removeprefix("*.")):
        return text.rstrip(".")
    try:
        return str(ip_network(text, strict=False))
    except ValueError:
        raise ValueError(f"neither a host nor a network: {pattern!r}") from None


def _matches(pattern: str, name: str, address: IPv4Address | IPv6Address | None) -> bool:
    if pattern == "any":
        return True
    if pattern == "loopback":
        return name == "localhost" or (address is not None and address.is_loopback)
    if address is None:
        return name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))
    try:
        return address in ip_network(pattern)
    except ValueError:
        return False


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.scope_id is not None:  # it may hold anything
        return None
    return getattr(address, "ipv4_mapped", None) or address
