"""Chunks in the host memory of another instance, which serves them.

Only reading: a peer fills its memory itself. What arrives is a frame, header and payload, verified like one
that was read from storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..address import Address
from ..errors import BackendError, ConfigError
from ..peer.credentials import ClientCredentials
from ..peer.session import ClientIdentity
from ..peer.transport import ClientCarrier
from .base import Backend, BackendContext, Capabilities, StoredObject

if TYPE_CHECKING:
    from ..peer.client import PeerClient

__all__ = ["PeerBackend"]

#: Share of the tier's timeout after which a call fails: the answer is to come before the worker is given up.
_SHARE = 0.8


class PeerBackend(Backend):
    """One connection to one peer.

    Parameters
    ----------
    context : BackendContext
    address : str
        ``host:port``.
    storage_options : mapping
        Credentials; see :class:`~kvstore.peer.credentials.ClientCredentials`.
    timeout : float
        Seconds that an operation of the tier may take.

    Raises
    ------
    ConfigError
        The credentials are malformed, or the extra ``p2p`` is not installed.
    """

    capabilities = Capabilities(bulk_exists=True)

    def __init__(
        self,
        context: BackendContext,
        address: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        timeout: float = 10.0,
    ) -> None:
        super().__init__(context)
        self._name = f"peer://{address}"
        self._address = Address.parse(address)
        self._credentials = ClientCredentials.of(storage_options or {}, f"tier {self._name!r}")
        self._timeout = _SHARE * timeout
        self._client: PeerClient | None = None
        _require_zmq(self._name)

    def open(self) -> None:
        """Connect, and prove that both are about the same namespace."""
        from ..peer.client import PeerClient  # which needs what comes with an extra

        self.close()
        context = self.context
        identity = ClientIdentity(
            fingerprint=context.fingerprint,
            chunk_size=context.chunk_size,
            manifest=context.manifest,
            token=self._credentials.token,
        )
        client = PeerClient(str(self._address), identity, self._connect, self._timeout)
        try:
            client.open()
        except BaseException:
            client.close()
            raise
        self._client = client

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the peer has each key, or is filling it."""
        found = self._opened.exists(keys)
        self._count()
        return found

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Receive a frame into the buffers; one that is being filled is waited for."""
        size = self._opened.fetch(key, header, payload)
        self._count()
        return size

    def close(self) -> None:
        """Say goodbye."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        """Refused."""
        _refuse("written to")

    def delete(self, keys: Sequence[bytes]) -> None:
        """Refused."""
        _refuse("deleted from")

    def scan(self) -> Iterator[StoredObject]:
        """Refused."""
        _refuse("listed")

    @property
    def _opened(self) -> PeerClient:
        if self._client is None:
            raise BackendError(f"{self._name} is not open", retryable=True)
        return self._client

    def _connect(self) -> ClientCarrier:
        from ..peer.zmq_carrier import ZmqClientCarrier

        return ZmqClientCarrier(self._address, self._credentials, self.context.chunk_size)

    def _count(self) -> None:
        counters = self._opened.counters
        if counters:
            taken, self._opened.counters = counters, type(counters)()
            for name, count in taken.items():
                self.counters[f"peer_{name}"] = self.counters.get(f"peer_{name}", 0.0) + count


def _require_zmq(name: str) -> None:
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"tier {name!r}: peers need pyzmq: pip install 'kvstore-tiers[p2p]'") from error


def _refuse(verb: str) -> NoReturn:
    raise BackendError(f"a peer is only read: it cannot be {verb}")
