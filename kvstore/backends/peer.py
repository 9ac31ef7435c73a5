"""Chunks in the host memory of another instance, which serves them.

Only reading: a peer fills its memory itself. What arrives is a frame, header and payload, verified like one
that was read from storage.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn

from .. import frame
from ..address import Address
from ..errors import BackendError, ConfigError
from ..peer.choice import Choice, make_nixl_reader, readers_of, settle, transports_of
from ..peer.credentials import ClientCredentials
from ..peer.session import ClientIdentity
from ..peer.transport import ClientCarrier
from ..remedies import install
from .base import Backend, BackendContext, Capabilities, StoredObject

if TYPE_CHECKING:
    from ..peer.calls import Call
    from ..peer.client import PeerClient
    from ..peer.nixl_reader import NixlReader

__all__ = ["PeerBackend"]

#: Share of the tier's timeout after which a call fails: the answer is to come before the worker is given up.
_SHARE = 0.8
#: Seconds for which a peer that a request has named is waited for.
_PATIENCE = 2.0
#: Peers of which is remembered what does not work with them.
_MOST_REMEMBERED = 1024


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
    concurrency : int
        Chunks under way at a time.
    transport : {"auto", "zmq", "nixl"}
        How payload comes.

    Raises
    ------
    ConfigError
        The credentials are malformed, or the extra ``p2p`` is not installed.
    """

    capabilities = Capabilities(bulk_exists=True, bulk_read=True, overlaps=True)

    def __init__(
        self,
        context: BackendContext,
        address: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        timeout: float = 10.0,
        concurrency: int = 16,
        transport: Choice = "auto",
    ) -> None:
        super().__init__(context)
        self._name = f"peer://{address}"
        self._address = Address.parse(address) if address else None
        self._credentials = ClientCredentials.of(storage_options or {}, f"tier {self._name!r}")
        self._timeout = _SHARE * timeout
        self._window = concurrency
        self._transport: Choice = transport
        self._client: PeerClient | None = None
        self._reviving = threading.Lock()
        self._given_up: dict[Address, set[str]] = {}  # transports
        self._nixl: NixlReader | None = None
        _require_zmq(self._name)

    def open(self) -> None:
        """Connect, and prove that both are about the same namespace; nothing while no peer is named."""
        self._hang_up()
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
        self._call(self._address)

    def _call(self, address: Address) -> PeerClient:
        self._client = self._make_client(address)
        self._client.open(_PATIENCE)
        return self._client

    def _make_client(self, address: Address) -> PeerClient:
        from ..peer.client import PeerClient  # which needs what comes with an extra

        credentials, avoided = self._credentials, self._given_up.get(address, ())
        choice = settle(self._transport, credentials, address)
        nixl = self._nixl_for(choice, address)
        able = readers_of(choice, nixl, address.host, encrypted=credentials.encrypts)
        readers = [reader for reader in able if reader.name not in avoided]
        context = self.context
        identity = ClientIdentity(
            fingerprint=context.fingerprint,
            chunk_size=context.chunk_size,
            manifest=context.manifest,
            token=credentials.token,
            transports=transports_of(choice, (reader.name for reader in readers)),
        )
        connect = partial(self._connect, address)
        return PeerClient(str(address), identity, connect, self._timeout, self._window, readers)

    def _nixl_for(self, choice: Choice, address: Address) -> NixlReader | None:
        """The reader of memory, with what it has registered, unless the last peer was elsewhere."""
        if self._nixl is not None and self._nixl.is_local != address.is_loopback:
            self._close_nixl()
        if self._nixl is None:
            self._nixl = make_nixl_reader(choice, f"tier {self._name!r}", is_local=address.is_loopback)
        return self._nixl if choice != "zmq" else None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the peer has each key, or is filling it."""
        client = self._opened
        found = client.exists(keys)
        self._count(client)
        return found

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Receive a frame into the buffers; one that is being filled is waited for."""
        arrived = self._fetch(key, header, payload).arrived
        return None if arrived is None else arrived.size

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        """As in the contract."""
        return self._verified(self._fetch(key, self._scratch.header, out))

    def read_many(
        self, keys: Sequence[bytes], outs: Sequence[memoryview]
    ) -> Iterator[int | Exception | None]:
        """As in the contract: while one chunk is verified the next ones arrive."""
        try:
            client = self._opened
        except Exception as error:
            return repeat(error, len(keys))
        headers = _slices(memoryview(bytearray(frame.HEADER_SIZE * len(keys))))
        outcomes = self._outcomes(client, client.fetch(zip(keys, headers, outs, strict=True)))
        next(outcomes)
        return outcomes

    def _outcomes(self, client: PeerClient, calls: Generator[Call]) -> Generator[int | Exception | None]:
        with closing(calls):
            yield None  # begun: whoever ends it now, even unused, waits for the calls
            for call in calls:
                self._count(client)
                try:
                    yield self._verified(call)
                except Exception as error:
                    yield error

    def _verified(self, call: Call) -> int | None:
        """Length of what has come for `call`; what was hashed as it arrived is not hashed again."""
        arrived = call.wait().arrived
        if arrived is None:
            return None
        assert call.buffers is not None
        (key,), (header, out) = call.keys, call.buffers
        size, digest = arrived
        if size != frame.HEADER_SIZE + frame.announced_length(header):  # it covers something else
            digest = None
        return frame.verify(header, out, size, key=key, fingerprint=self.context.fingerprint, digest=digest)

    def _fetch(self, key: bytes, header: memoryview, payload: memoryview) -> Call:
        client = self._opened
        (call,) = client.fetch([(key, header, payload)])
        self._count(client)
        return call.wait()

    def close(self) -> None:
        """Say goodbye."""
        self._hang_up()
        self._close_nixl()

    def _close_nixl(self) -> None:
        nixl, self._nixl = self._nixl, None
        if nixl is not None:
            nixl.close()

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        client.close()
        if client.given_up and self._address is not None:
            self._given_up.setdefault(self._address, set()).update(client.given_up)
            if len(self._given_up) > _MOST_REMEMBERED:
                del self._given_up[next(iter(self._given_up))]

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
        with self._reviving:
            client = self._client
            if client is None or self._address is None:
                raise BackendError(f"{self._name} is not open", retryable=True)
            if client.is_alive:
                return client
            self._hang_up()  # its thread has ended by an error that nobody has foreseen
            return self._call(self._address)

    def _connect(self, address: Address) -> ClientCarrier:
        from ..peer.zmq_carrier import ZmqClientCarrier

        return ZmqClientCarrier(address, self._credentials, self.context.chunk_size)

    def _count(self, client: PeerClient) -> None:
        counters = client.counters
        if counters:
            taken, client.counters = counters, type(counters)()
            for name, count in taken.items():
                self.counters[f"peer_{name}"] = self.counters.get(f"peer_{name}", 0.0) + count


def _slices(headers: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(headers), frame.HEADER_SIZE):
        yield headers[start : start + frame.HEADER_SIZE]


def _require_zmq(name: str) -> None:
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"tier {name!r}: peers need pyzmq: {install('p2p')}") from error


def _refuse(verb: str) -> NoReturn:
    raise BackendError(f"a peer is only read: it cannot be {verb}")
