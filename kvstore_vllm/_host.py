"""The host of a rendezvous: what is said on its socket, and the thread that admits members.

A message is a length of 4 bytes and JSON; with the first byte of the host's answer comes the descriptor of
the arena. Who owns what: the thread of a :class:`Host` alone touches the connections and the list of members.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import struct
import threading
import weakref
from contextlib import suppress
from typing import Any

import msgspec

from kvstore.errors import ConfigError

__all__ = ["PROTOCOL", "Answer", "Host", "Request", "address_of", "ask", "connect", "elect", "peer_of"]

PROTOCOL = 1
#: Seconds that a member may take to say what it wants.
_PATIENCE = 10.0
_LENGTH = struct.Struct("=I")
_CREDENTIALS = struct.Struct("=iII")
_SHOWN = 60


class Request(msgspec.Struct, frozen=True):
    """What a member says of itself; one without `identity` takes the host's."""

    protocol: int
    rank: int | None
    capacity: int
    chunk_size: int
    identity: dict[str, Any] | None


class Answer(msgspec.Struct, frozen=True):
    """What the host says: why not, or what all members share."""

    refusal: str = ""
    identity: dict[str, Any] = {}
    unknown: tuple[str, ...] = ()
    facts: dict[str, Any] = {}


class Host:
    """Admits members to an arena until closed.

    Parameters
    ----------
    listener : socket
        From :func:`elect`; the host closes it.
    arena_fd : int
        Passed on to members.
    request : Request
        What the host itself, a member like others, asked for: they must fit.
    answer : Answer
        What members are told.
    """

    def __init__(self, listener: socket.socket, arena_fd: int, request: Request, answer: Answer) -> None:
        self._listener = listener
        self._arena_fd = arena_fd
        self._request = request
        self._answer = answer
        self._taken = {request.rank: os.getpid()}
        self._members: dict[socket.socket, int | None] = {}
        self._bell, self._ringer = socket.socketpair()
        _ends.update((self._bell, self._ringer))
        self._thread = threading.Thread(target=self._serve, name="kvstore-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Admit nobody any more; who was admitted keeps what it has got. Repeated calls do nothing."""
        with suppress(OSError):  # it is closed, or this is a forked child
            self._ringer.send(b"!")
        self._ringer.close()
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in (self._listener, self._bell):
                selector.register(end, selectors.EVENT_READ)
            while True:
                ready: list[Any] = [key.fileobj for key, _ in selector.select()]
                if self._bell in ready:
                    break
                for end in ready:
                    if end is self._listener:
                        member = self._admit()
                        if member is not None:
                            selector.register(member, selectors.EVENT_READ)
                    else:  # a member says nothing more: this is its end
                        selector.unregister(end)
                        del self._taken[self._members.pop(end)]
                        end.close()
        for end in (self._listener, self._bell, *self._members):
            end.close()

    def _admit(self) -> socket.socket | None:
        """Answer who has connected; its connection when it is a member now."""
        connection, _ = self._listener.accept()
        _ends.add(connection)
        try:
            connection.settimeout(_PATIENCE)
            pid, uid = peer_of(connection)
            content, _ = _receive(connection)
            request = msgspec.json.decode(content, type=Request)
            refusal = self._refusal(request) if uid == os.geteuid() else "this engine is another user's"
            if not refusal:
                _send(connection, self._answer, [self._arena_fd])
                self._taken[request.rank] = pid
                self._members[connection] = request.rank
                return connection
            _send(connection, Answer(refusal=refusal))
        except (OSError, msgspec.MsgspecError):  # it went away, or is none of ours
            pass
        connection.close()
        return None

    def _refusal(self, request: Request) -> str:
        """Why the host does not admit who asks, in one line; empty when it does."""
        own = self._request
        if request.protocol != own.protocol:
            return "the processes of this engine run different versions of kvstore"
        if request.rank in self._taken:
            what = "a scheduler" if request.rank is None else f"a worker of rank {request.rank}"
            return (
                f"this engine has {what} already, process {self._taken[request.rank]}; "
                "engines on one machine need different values of engine_id"
            )
        sizes = [(r.capacity, r.chunk_size) for r in (request, own)]
        if sizes[0] != sizes[1]:
            return (
                f"the processes of this engine disagree on host memory: capacity and chunk size in bytes are "
                f"{sizes[0]} for rank {request.rank}, {sizes[1]} for rank {own.rank}"
            )
        if request.identity is None or request.identity == own.identity:
            return ""
        return (
            f"rank {request.rank} would store other bytes than rank {own.rank}: {self._difference(request)}"
        )

    def _difference(self, request: Request) -> str:
        """The fields of the identities that differ."""
        theirs, ours = request.identity or {}, self._request.identity or {}
        return ", ".join(
            f"{name} is {_short(theirs.get(name))}, not {_short(ours.get(name))}"
            for name in sorted({*theirs, *ours})
            if theirs.get(name) != ours.get(name)
        )


def address_of(name: str) -> bytes:
    """The abstract address at which the processes of an engine meet; names may be of any length."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return b"\0" + f"kvstore-vllm-{os.geteuid()}-{digest}".encode()


def elect(address: bytes) -> socket.socket | None:
    """A listening socket where nobody listens yet; None where somebody does."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        return None
    listener.listen(128)
    _ends.add(listener)
    return listener


def connect(address: bytes) -> socket.socket | None:
    """A connection to the host; None while there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    _ends.add(connection)
    return connection


def ask(connection: socket.socket, request: Request, timeout: float) -> tuple[Answer, int]:
    """What the host answers, and the descriptor of the arena (-1 with a refusal).

    Raises
    ------
    ConfigError
        The host is another user's.
    ConnectionError
        It has gone.
    TimeoutError
        It is silent for `timeout` seconds.
    """
    pid, uid = peer_of(connection)
    if uid != os.geteuid():
        raise ConfigError(f"the name of this engine is held by user {uid}, process {pid}")
    connection.settimeout(timeout)
    _send(connection, request)
    content, fds = _receive(connection)
    return msgspec.json.decode(content, type=Answer), fds[0] if fds else -1


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end: of a host, those who began to listen."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _send(connection: socket.socket, message: msgspec.Struct, fds: list[int] | None = None) -> None:
    content = msgspec.json.encode(message)
    socket.send_fds(connection, [_LENGTH.pack(len(content))], fds or [])
    connection.sendall(content)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, and the descriptors that came with it."""
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    if len(head) < _LENGTH.size:
        raise ConnectionResetError("the other end has hung up")
    [length] = _LENGTH.unpack(head)
    content = bytearray()
    while len(content) < length:
        part = connection.recv(min(length - len(content), 1 << 20))
        if not part:
            for fd in fds:
                os.close(fd)
            raise ConnectionResetError("the other end has hung up")
        content += part
    return bytes(content), fds


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


#: Sockets of this process, which a forked child must not keep alive.
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _drop_in_child() -> None:
    for end in list(_ends):
        end.close()


os.register_at_fork(after_in_child=_drop_in_child)
