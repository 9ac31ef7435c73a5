"""Who may open a session with a server, and about which bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import NamespaceMismatchError
from .protocol import VERSION, Hello

__all__ = ["ServerIdentity"]

#: Characters of an explanation.
_LONGEST_DETAIL = 1500


@dataclass(frozen=True)
class ServerIdentity:
    """What the sessions of a server are about.

    Attributes
    ----------
    fingerprint : bytes
    chunk_size : int
        Bytes.
    check_manifest : callable
        Raises `NamespaceMismatchError`, which names the differing fields.
    token : bytes
        What clients must know; empty for nothing.
    transport : str
        How payload travels.
    """

    fingerprint: bytes
    chunk_size: int
    check_manifest: Callable[[bytes], None]
    token: bytes = field(default=b"", repr=False)
    transport: str = "zmq"

    def skew(self, hello: Hello) -> str:
        """Why the client's protocol is not this server's; empty when it is."""
        return "" if hello.version == VERSION else f"version: found {hello.version}, expected {VERSION}"

    def differences(self, hello: Hello) -> str:
        """Why the client's bytes are not this server's, with the fields that differ; empty when they are."""
        if hello.fingerprint != self.fingerprint:
            try:
                self.check_manifest(hello.manifest)
            except NamespaceMismatchError as error:
                return str(error)[:_LONGEST_DETAIL]
            return f"fingerprint: found {hello.fingerprint.hex()}, expected {self.fingerprint.hex()}"
        if hello.chunk_size != self.chunk_size:
            return f"chunk_size: found {hello.chunk_size}, expected {self.chunk_size}"
        return ""
