"""A server of peers that sends whatever bytes it was given as objects, also such as no server of ours
would."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from kvstore import frame
from kvstore.peer.protocol import (
    HERE,
    MISSING,
    VERSION,
    Chunk,
    Fetch,
    Found,
    Hello,
    Lookup,
    Message,
    Missing,
    Offer,
    Refused,
    Welcome,
    decode_request,
    encode,
)

__all__ = ["Objects"]


class Objects(threading.Thread):
    """Serves a dict of objects.

    Parameters
    ----------
    manifest : bytes
    transport : str
        Offered to those who ask for it first; everybody else gets payload beside the messages.
    metadata : bytes
        What they need for that.
    offer : callable
        Puts a payload where they find it, and says where.
    """

    def __init__(
        self,
        manifest: bytes,
        transport: str = "",
        metadata: bytes = b"",
        offer: Callable[[bytes], int] = len,
    ) -> None:
        super().__init__(daemon=True)
        self.manifest = manifest
        self._transport = transport
        self._metadata = metadata
        self._offer = offer
        self._aside: set[bytes] = set()  # clients
        self.objects: dict[bytes, bytes] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind("inproc://end")
        self._ear = self._context.socket(zmq.PAIR)
        self._ear.connect("inproc://end")

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ear, zmq.POLLIN)
        while self._ear not in dict(poller.poll()):
            peer, data = self._socket.recv_multipart()
            request = decode_request(data)
            if isinstance(request, Hello):
                self._greet(peer, request)
            elif isinstance(request, Lookup):
                states = bytes(HERE if key in self.objects else MISSING for key in request.keys)
                self._say(peer, Found(request.session, request.id, states))
            elif isinstance(request, Fetch):
                self._send(peer, request)
        self._socket.close()
        self._ear.close()

    def end(self) -> None:
        self._bell.send(b"")
        self.join()
        self._bell.close()
        self._context.term()

    def _greet(self, peer: bytes, hello: Hello) -> None:
        if hello.manifest != self.manifest:
            self._say(peer, Refused(hello.session, "namespace", "manifest: found another"))
        elif hello.transports[0] == self._transport:
            self._aside.add(peer)
            self._say(peer, Welcome(hello.session, VERSION, b"", self._transport, self._metadata))
        else:
            self._aside.discard(peer)
            self._say(peer, Welcome(hello.session, VERSION, b"", "zmq"))

    def _send(self, peer: bytes, fetch: Fetch) -> None:
        for index, key in enumerate(fetch.keys):
            data = self.objects.get(key)
            if data is None:
                self._say(peer, Missing(fetch.session, fetch.id, [index]))
                continue
            header, payload = data[: frame.HEADER_SIZE], data[frame.HEADER_SIZE :]
            chunk = (fetch.session, fetch.id, index, len(payload))
            if peer in self._aside:
                offer = Offer(fetch.session, fetch.id, [(index, len(payload), self._offer(payload))])
                self._socket.send_multipart([peer, encode(offer), header])
            else:
                self._socket.send_multipart([peer, encode(Chunk(*chunk)), header, payload])

    def _say(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, encode(message)])
