"""Chunks in the host memory of another instance, which serves them.

Only reading: a peer fills its memory itself. What arrives is a frame, header and payload, verified like one
that was read from storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from .. import frame
from ..address import Address
from ..errors import BackendError, ConfigError
from ..peer.choice import Choice, make_nixl_reader, readers_of, settle, transports_of
from ..peer.credentials import ClientCredentials
from ..peer.session import ClientIdentity
from ..peer.transport import ClientCarrier
from .base import Backend, BackendContext, Capabilities, StoredObject

if TYPE_CHECKING:
    from ..peer.calls import Arrived
    from ..peer.client import PeerClient
    from ..peer.nixl_memory import NixlReader

__all__ = ["PeerBackend"]

#: Share of the tier's timeout after which a call fails: the answer is to come before the worker is given up.
_SHARE = 0.8
#: Seconds for which a peer that a request has named is waited for.
_PATIENCE = 2.0


class PeerBackend(Backend):
    """One connection to one peer.

    Parameters
    ----------
    context : BackendContext
    address : str
        ``host:port``; empty for a peer that is named later, by :meth:`dial`.
    storage_options : mapping
        Credentials; see :class:`~kvstore.peer.credentials.ClientCredentials`.
    timeout : float
        Seconds that an operation of the tier may take.
    transport : {"auto", "zmq", "nixl"}
        How payload comes.

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
        transport: Choice = "auto",
    ) -> None:
        super().__init__(context)
        self._name = f"peer://{address}"
        self._address = Address.parse(address) if address else None
        self._credentials = ClientCredentials.of(storage_options or {}, f"tier {self._name!r}")
        self._timeout = _SHARE * timeout
        self._encrypted = bool(self._credentials.curve_server_key)
        self._transport = settle(transport, encrypted=self._encrypted)
        self._client: PeerClient | None = None
        self._nixl: NixlReader | None = None
        _require_zmq(self._name)

    def open(self) -> None:
        """Connect, and prove that both are about the same namespace; nothing while no peer is named."""
        self._hang_up()
        self._nixl = self._nixl or make_nixl_reader(self._transport, f"tier {self._name!r}")
        if self._address is None:
            return
        client = self._make_client(self._address)
        try:
            client.open()
        except BaseException:
            client.close()
            raise
        self._client = client

    def dial(self, address: str) -> None:
        """Connect to this peer from now on. One that is not there is waited for once; afterwards calls fail
        at once for as long as there is no connection."""
        self._hang_up()
        self._name, self._address = f"peer://{address}", Address.parse(address)
        self._client = self._make_client(self._address)
        self._client.open(_PATIENCE)

    def _make_client(self, address: Address) -> PeerClient:
        from ..peer.client import PeerClient  # which needs what comes with an extra

        readers = readers_of(self._transport, self._nixl, address.host, encrypted=self._encrypted)
        context = self.context
        identity = ClientIdentity(
            fingerprint=context.fingerprint,
            chunk_size=context.chunk_size,
            manifest=context.manifest,
            token=self._credentials.token,
            transports=transports_of(self._transport, (reader.name for reader in readers)),
        )
        connect = partial(self._connect, address)
        return PeerClient(str(address), identity, connect, self._timeout, readers)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the peer has each key, or is filling it."""
        found = self._opened.exists(keys)
        self._count()
        return found

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Receive a frame into the buffers; one that is being filled is waited for."""
        arrived = self._fetch(key, header, payload)
        return None if arrived is None else arrived.size

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        """As in the contract; what was hashed as it arrived is not hashed again."""
        header = self._scratch.header
        arrived = self._fetch(key, header, out)
        if arrived is None:
            return None
        size, digest = arrived
        if size != frame.HEADER_SIZE + frame.announced_length(header):  # it covers something else
            digest = None
        return frame.verify(header, out, size, key=key, fingerprint=self.context.fingerprint, digest=digest)

    def _fetch(self, key: bytes, header: memoryview, payload: memoryview) -> Arrived | None:
        arrived = self._opened.fetch(key, header, payload)
        self._count()
        return arrived

    def close(self) -> None:
        """Say goodbye."""
        self._hang_up()
        nixl, self._nixl = self._nixl, None
        if nixl is not None:
            nixl.close()

    def _hang_up(self) -> None:
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

    def _connect(self, address: Address) -> ClientCarrier:
        from ..peer.zmq_carrier import ZmqClientCarrier

        return ZmqClientCarrier(address, self._credentials, self.context.chunk_size)

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
