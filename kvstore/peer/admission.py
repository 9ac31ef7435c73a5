"""Who may open a session with a server, and about which bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import NamespaceMismatchError
from .protocol import VERSION, Hello, Reason
from .transport import ZMQ

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
    offers : mapping
        Name of each transport by which payload may travel, the best one first -> what clients need to use it.
    """

    fingerprint: bytes
    chunk_size: int
    check_manifest: Callable[[bytes], None]
    token: bytes = field(default=b"", repr=False)
    offers: Mapping[str, bytes] = field(default_factory=lambda: {ZMQ: b""})

    def skew(self, hello: Hello) -> str:
        """Why the client's protocol is not this server's; empty when it is."""
        return "" if hello.version == VERSION else f"version: found {hello.version}, expected {VERSION}"

    def choose(self, hello: Hello) -> str:
        """The transport for this client; empty when it has none of those offered."""
        return next((name for name in self.offers if name in hello.transports), "")

    def objection(self, hello: Hello) -> tuple[Reason, str] | None:
        """Why a client that has proved what it must is refused, with the fields that differ."""
        detail = self._differences(hello)
        if detail:
            return "namespace", detail
        if not self.choose(hello):
            return "transport", f"transport: found {hello.transports}, expected one of {list(self.offers)}"
        return None

    def _differences(self, hello: Hello) -> str:
        if hello.fingerprint != self.fingerprint:
            try:
                self.check_manifest(hello.manifest)
            except NamespaceMismatchError as error:
                return str(error)[:_LONGEST_DETAIL]
            return f"fingerprint: found {hello.fingerprint.hex()}, expected {self.fingerprint.hex()}"
        if hello.chunk_size != self.chunk_size:
            return f"chunk_size: found {hello.chunk_size}, expected {self.chunk_size}"
        return ""
