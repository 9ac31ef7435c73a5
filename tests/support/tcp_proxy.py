"""A TCP proxy between a client and a server that can do to connections what networks do.

Its switches may be turned at any time, and hold from the next bytes on. It also counts the HTTP requests that
pass: one whose head starts a piece of what the client sends, as that of every request on a connection without
pipelining does.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Proxy"]

_HEAD = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\r\n")
_PIECE = 64 << 10


class Proxy:
    """Forwards connections to `target`; a context manager.

    Parameters
    ----------
    target : tuple
        Host and port of the server.

    Attributes
    ----------
    connections : int
        How many clients have made.
    requests : Counter
        (method, target of the request) -> how often.
    hanging : threading.Event
        While set, the proxy takes what comes and passes nothing on, in neither direction.
    delay : float
        Seconds before each piece of an answer is passed on.
    rewrite : callable, optional
        Changes a piece of what the client sends.
    reply : callable, optional
        Answers for the server when it returns bytes for the head of a request.
    answer_limit : int or None
        Bytes of an answer after which the connection ends, counted from the last request's head.
    reset : bool
        Whether it then ends with a reset, not in an orderly way.
    cuts : int
        How many connections have been ended so; `most_cuts` of them at most, if that is given.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.connections = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self.hanging = threading.Event()
        self.delay = 0.0
        self.rewrite: Callable[[bytes], bytes] | None = None
        self.reply: Callable[[bytes], bytes | None] | None = None
        self.answer_limit: int | None = None
        self.reset = False
        self.cuts = 0
        self.most_cuts: int | None = None
        self._target = target
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def count(self, method: str, ending: str = "") -> int:
        """Requests of a method, for targets that end in `ending`."""
        with self._lock:
            return sum(
                number
                for (found, target), number in self.requests.items()
                if found == method and target.partition("?")[0].endswith(ending)
            )

    def await_request(self, method: str, timeout: float = 10.0) -> None:
        """Return when a request of this method has come; hanging or not."""

        def has_come() -> bool:
            return any(found == method for found, _ in self.requests)

        with self._changed:
            assert self._changed.wait_for(has_come, timeout), f"no {method} has come"

    def forget(self) -> None:
        """Count from zero."""
        with self._lock:
            self.requests.clear()

    def close(self) -> None:
        """End every connection, and take no more."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for end in self._sockets:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            link = _Link(self, client, server)
            with self._lock:
                self.connections += 1
                self._sockets += [client, server]
            for pump in (link.pass_requests, link.pass_answers):
                threading.Thread(target=pump, name="proxy", daemon=True).start()

    def note(self, data: bytes) -> bool:
        """Count the request that `data` starts, if it starts one."""
        head = _HEAD.match(data)
        if head is None:
            return False
        with self._lock:
            self.requests[head[1].decode(), head[2].decode()] += 1
            self._changed.notify_all()
        return True

    def may_pass(self) -> bool:
        """Wait while the proxy hangs; False when it is closed."""
        while self.hanging.is_set() and not self._closed.wait(0.01):
            pass
        return not self._closed.is_set()

    def wait(self, seconds: float) -> None:
        """Wait, or until the proxy is closed."""
        self._closed.wait(seconds)

    def may_cut(self) -> bool:
        """Whether one more connection is to be ended."""
        with self._lock:
            if self.most_cuts is not None and self.cuts >= self.most_cuts:
                return False
            self.cuts += 1
            return True


class _Link:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._answered = 0
        self._cutting = False
        self._requests_over = threading.Event()

    def pass_requests(self) -> None:
        """Until the client ends, or the proxy does."""
        with suppress(OSError):
            self._pass_requests()
        self._requests_over.set()
        if not self._cutting:
            self._end()

    def _pass_requests(self) -> None:
        while data := self._client.recv(_PIECE):
            starts = self._proxy.note(data)
            if not self._proxy.may_pass():
                return
            if starts:
                self._answered = 0
                reply = self._proxy.reply(data) if self._proxy.reply is not None else None
                if reply is not None:
                    self._client.sendall(reply)
                    continue
            if self._proxy.rewrite is not None:
                data = self._proxy.rewrite(data)
            self._server.sendall(data)

    def pass_answers(self) -> None:
        """Until the server ends, or the proxy does."""
        with suppress(OSError):
            while data := self._server.recv(_PIECE):
                if not self._proxy.may_pass():
                    return
                self._proxy.wait(self._proxy.delay)
                limit = self._proxy.answer_limit
                if limit is not None and self._answered + len(data) > limit and self._proxy.may_cut():
                    self._client.sendall(data[: max(0, limit - self._answered)])
                    self._cut()
                    return
                self._answered += len(data)
                self._client.sendall(data)
        self._end()

    def _cut(self) -> None:
        if self._proxy.reset:
            self._cutting = True
            self._client.shutdown(socket.SHUT_RD)  # a socket is closed when no thread waits for it any longer
            self._requests_over.wait(5.0)
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._client.close()
            self._server.shutdown(socket.SHUT_RDWR)
        else:
            self._end()

    def _end(self) -> None:
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
