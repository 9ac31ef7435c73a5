"""Messages between peers over ZMQ.

A message has parts: control, for a chunk also its header, and payload unless that is read one-sided. The
server sends payload from the arena's slot and copies nothing; the client takes it straight into the slot that
it is for. Both sides watch their connections with heartbeats, and the client connects again with growing
pauses.
"""

from __future__ import annotations

from contextlib import suppress

import zmq
from zmq.utils import z85

from ..address import Address
from .credentials import ClientCredentials, ServerCredentials
from .protocol import CONTROL_LIMIT
from .transport import ClientCarrier, Delivery, ServerCarrier

__all__ = ["ZmqClientCarrier", "ZmqServerCarrier"]

#: Milliseconds between heartbeats, and without one until a connection counts as dead.
_HEARTBEAT, _HEARTBEAT_TIMEOUT = 2000, 6000
#: Milliseconds before the client tries to connect again: the first time, and at most.
_RECONNECT, _LONGEST_RECONNECT = 50, 2000
#: Milliseconds that one try to connect may take. The kernel repeats it with pauses that grow beyond half a
#: minute, and would not soon notice that a network is up again.
_CONNECT = 2000
#: Messages that may wait in a socket.
_MARK = 2048
#: Bytes of the kernel's buffers; large ones keep a fast link busy between two turns of the interpreter.
_BUFFER = 4 << 20
#: Milliseconds that a closing client waits for its last words to leave.
_LINGER = 200
_DISCARD = memoryview(bytearray(1))


class ZmqServerCarrier(ServerCarrier):
    """A ROUTER that listens at `address`.

    Raises
    ------
    zmq.ZMQError
        It cannot listen there.
    """

    def __init__(self, address: Address, credentials: ServerCredentials) -> None:
        self.dropped = 0
        self._context = zmq.Context(io_threads=1)
        self._doorman = (
            _Doorman(self._context, credentials.allowed_keys) if credentials.curve_secret_key else None
        )
        self._socket = socket = self._context.socket(zmq.ROUTER)
        _set_up(socket, address, CONTROL_LIMIT)
        socket.router_mandatory = True
        if credentials.curve_secret_key:
            socket.curve_server = True
            socket.curve_secretkey = credentials.curve_secret_key.encode()
        try:
            socket.bind(str(address))
        except zmq.ZMQError:
            self.close()
            raise
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        if self._doorman is not None:
            poller.register(self._doorman.socket, zmq.POLLIN)

    def receive(self) -> Delivery | None:
        if self._doorman is not None:
            self._doorman.answer()
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(parts) == 2:
                return Delivery(*parts)
            self.dropped += 1

    def send(
        self, peer: bytes, control: bytes, header: memoryview | None = None, payload: memoryview | None = None
    ) -> bool:
        try:
            parts = (peer, control) if header is None else (peer, control, header)
            self._socket.send_multipart(parts, zmq.NOBLOCK | (0 if payload is None else zmq.SNDMORE))
            if payload is not None:
                self._socket.send(payload, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # no route to the host, or its queue is full: it does not take anything
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close(0)
        if self._doorman is not None:
            self._doorman.socket.close(0)
        self._context.term()


class _Doorman:
    """Answers the questions of a context whether the owner of a public key may connect (ZeroMQ RFC 27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: tuple[str, ...]) -> None:
        self._allowed = {z85.decode(key) for key in allowed}
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer what has been asked so far."""
        with suppress(zmq.Again):
            while True:
                version, number, _, _, _, mechanism, *keys = self.socket.recv_multipart(zmq.NOBLOCK)
                known = mechanism == b"CURVE" and len(keys) == 1 and keys[0] in self._allowed
                verdict = [b"200", b"OK"] if known else [b"400", b"this key is not allowed"]
                self.socket.send_multipart([version, number, *verdict, b"", b""])


class ZmqClientCarrier(ClientCarrier):
    """A DEALER that connects to `address`."""

    def __init__(self, address: Address, credentials: ClientCredentials, chunk_size: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = socket = self._context.socket(zmq.DEALER)
        _set_up(socket, address, max(CONTROL_LIMIT, chunk_size))
        socket.immediate = True  # nothing is queued for a connection that is not there
        socket.connect_timeout = _CONNECT
        socket.reconnect_ivl = _RECONNECT
        socket.reconnect_ivl_max = _LONGEST_RECONNECT
        if credentials.curve_server_key:
            socket.curve_serverkey = credentials.curve_server_key.encode()
            socket.curve_publickey = credentials.curve_public_key.encode()
            socket.curve_secretkey = credentials.curve_secret_key.encode()
        self._losses = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(str(address))

    def register(self, poller: zmq.Poller) -> None:
        for socket in (self._socket, self._losses):
            poller.register(socket, zmq.POLLIN)

    def send(self, control: bytes) -> bool:
        try:
            self._socket.send(control, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def has_lost_connection(self) -> bool:
        is_lost = False
        with suppress(zmq.Again):
            while self._losses.recv_multipart(zmq.NOBLOCK):
                is_lost = True
        return is_lost

    def receive(self) -> bytes | None:
        self._discard()
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def take(self, header: memoryview, payload: memoryview) -> int:
        size = 0
        for buffer in (header, payload):
            if self._more:
                size += self._socket.recv_into(buffer)
        while self._more:
            size += self._socket.recv_into(_DISCARD)
        return size

    def close(self) -> None:
        self._socket.disable_monitor()
        self._losses.close(0)
        self._socket.close(_LINGER)
        self._context.term()

    @property
    def _more(self) -> bool:
        """Whether the last message has another part; to ask for the option by its name takes ten times as
        long."""
        return bool(self._socket.getsockopt(zmq.RCVMORE))

    def _discard(self) -> None:
        while self._more:
            self._socket.recv_into(_DISCARD)


def _set_up(socket: zmq.Socket[bytes], address: Address, largest: int) -> None:
    """What both sides share; `largest` is the size of the largest part that may come in."""
    socket.linger = 0
    socket.ipv6 = ":" in address.host
    socket.maxmsgsize = largest
    socket.sndhwm = socket.rcvhwm = _MARK
    socket.sndbuf = socket.rcvbuf = _BUFFER
    socket.heartbeat_ivl = _HEARTBEAT
    socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT
    socket.handshake_ivl = _HEARTBEAT_TIMEOUT
