"""A TCP proxy between a peer and its reader that knows what they say, and stops them at any step of it.

It reads the frames of ZMTP 3 (ZeroMQ RFC 37) and the control messages in them, and passes on every byte as it
came. Connections of payload are led through it as well, by the port that the server's ``Welcome`` names.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from kvstore.peer.protocol import Message, Welcome, decode_answer, decode_request, encode

__all__ = ["PAYLOAD", "Checkpoint"]

#: Step in the middle of a chunk's payload, however it travels; the others are names of messages.
PAYLOAD = "payload"
_GREETING = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_PIECE = 64 << 10

Passing = Callable[[socket.socket, socket.socket], None]
"""Passes on what comes from one end to the other."""


class Checkpoint:
    """Passes on what readers and the server at `target` say; a context manager.

    Parameters
    ----------
    target : tuple
        Host and port of the server.
    streams : bool
        Whether payload gets through beside the messages; if not, those connections are refused.

    Attributes
    ----------
    rewrite : callable, optional
        Makes another message, of the same length, of one that passes.
    handshakes : int
        Sides of connections that have been ready for messages.
    """

    def __init__(self, target: tuple[str, int], *, streams: bool = True) -> None:
        self.rewrite: Callable[[Message], Message] | None = None
        self.handshakes = 0
        self._target = self._stream_target = target
        self._changed = threading.Condition()
        self._shut = ""  # the step at which nothing passes
        self._arrived = False
        self._closed = False
        self._ends: list[socket.socket] = []
        self._messages = socket.create_server(("127.0.0.1", 0))
        self._streams = socket.socket()
        self._streams.bind(("127.0.0.1", 0))
        self._listen(self._messages, self._pass_messages, self._pass_messages)
        if streams:
            self._streams.listen()
            self._listen(self._streams, _pass_all, self._pass_payload)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.open()
        for listener in (self._messages, self._streams):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    @property
    def url(self) -> str:
        """Where a reader finds the server."""
        return f"peer://127.0.0.1:{self._messages.getsockname()[1]}"

    # What a test does.

    @contextmanager
    def stopping(self, step: str) -> Iterator[None]:
        """Let nothing pass that gets to `step`, or comes after it, until the block is left."""
        with self._changed:
            self._shut, self._arrived = step, False
        try:
            yield
        finally:
            self.open()

    def open(self) -> None:
        """Let pass what has been stopped."""
        with self._changed:
            self._shut = ""
            self._changed.notify_all()

    def has_arrival(self, timeout: float) -> bool:
        """Whether anything gets to the step within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._arrived, timeout)

    def cut(self) -> None:
        """End every connection."""
        with self._changed:
            ends, self._ends = self._ends, []
        for end in ends:
            _end(end)

    # Connections.

    def _listen(self, listener: socket.socket, there: Passing, back: Passing) -> None:
        def accept() -> None:
            while not self._closed:
                with suppress(OSError):
                    reader, _ = listener.accept()
                    threading.Thread(target=self._join, args=(reader, there, back), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _join(self, reader: socket.socket, there: Passing, back: Passing) -> None:
        """Pass on what one connection brings, both ways, until it ends."""
        with suppress(OSError), reader:
            target = self._stream_target if there is _pass_all else self._target
            with socket.create_connection(target) as server:
                with self._changed:
                    self._ends += [reader, server]
                answers = threading.Thread(target=_run, args=(back, server, reader), daemon=True)
                answers.start()
                _run(there, reader, server)
                answers.join()

    def _pass_messages(self, source: socket.socket, sink: socket.socket) -> None:
        for _ in range(_GREETING):  # each side sends some of it, and waits for the other's
            sink.sendall(_take(source, 1))
        part = 0  # of a message: control, header, payload
        is_ready = False
        while True:
            flags = _take(source, 1)
            size = _take(source, 8 if flags[0] & _LONG else 1)
            body = _take(source, int.from_bytes(size))
            sink.sendall(flags + size)
            if flags[0] & _COMMAND:
                sink.sendall(body)
                if not is_ready:
                    is_ready = True
                    with self._changed:
                        self.handshakes += 1
                continue
            if part == 0:
                sink.sendall(self._inspect(body))
            else:
                self._send(sink, body, stops=part == 2)
            part = part + 1 if flags[0] & _MORE else 0

    def _pass_payload(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(_PIECE):
            self._send(sink, data, stops=True)

    def _send(self, sink: socket.socket, data: bytes, *, stops: bool) -> None:
        half = len(data) // 2
        sink.sendall(data[:half])
        if stops:
            self._stop_at(PAYLOAD)
        sink.sendall(data[half:])

    def _inspect(self, body: bytes) -> bytes:
        """A control message as it is to be passed on; returns when it may pass."""
        message: Message | None = decode_request(body) or decode_answer(body)
        if message is None:
            return body
        if isinstance(message, Welcome) and message.transport == "stream":
            self._stream_target = (self._target[0], int.from_bytes(message.metadata))
            here = self._streams.getsockname()[1].to_bytes(2)
            message = msgspec.structs.replace(message, metadata=here)
        if self.rewrite is not None:
            message = self.rewrite(message)
        self._stop_at(type(message).__name__)
        passed = encode(message)
        assert len(passed) == len(body)
        return passed

    def _stop_at(self, step: str) -> None:
        with self._changed:
            if step == self._shut:
                self._arrived = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._shut != step)


def _run(passing: Passing, source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        passing(source, sink)
    _end(source)
    _end(sink)


def _pass_all(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(_PIECE):
        sink.sendall(data)


def _take(source: socket.socket, size: int) -> bytes:
    data = source.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) < size:
        raise ConnectionError("it has ended")
    return data


def _end(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
