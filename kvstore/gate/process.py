"""The serving process: what it is told, and how it begins and ends.

It has a fresh interpreter, the arena and its end of the link, and nothing else of its parent. It ends when
the owner closes the link, or is gone.
"""

from __future__ import annotations

import os
import pickle
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, ClassVar

from ..address import Address
from ..arena import Arena
from ..engine.child import ProcessSpec, take_place, watch_parent
from ..namespace import Namespace
from ..peer.admission import ServerIdentity
from ..peer.choice import Choice, make_regions, settle, transports_of
from ..peer.credentials import ServerCredentials
from ..peer.limits import Limits
from ..peer.link import Down, Up, encode

if TYPE_CHECKING:
    from ..peer.server import Server

__all__ = ["ServeSpec", "main"]


@dataclass(frozen=True)
class ServeSpec(ProcessSpec):
    """Everything a serving process is told."""

    module: ClassVar[str] = "kvstore.gate.process"

    address: Address
    namespace: Namespace
    credentials: ServerCredentials
    limits: Limits
    transport: Choice
    nice: int | None
    affinity: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """What the process is for, in messages."""
        return f"serve={self.address}"


def main(spec_file: BinaryIO) -> None:
    """Serve until the owner closes the link, or is gone."""
    spec: ServeSpec = pickle.load(spec_file)
    spec_file.close()
    watch_parent(spec.parent)
    owner = socket.socket(fileno=spec.jobs_fd)
    try:
        server = _start(spec, owner)
    except Exception as error:
        owner.send(encode(Down(f"{type(error).__name__}: {error}")))
        os._exit(1)
    server.run()
    os._exit(0)  # what waits to be sent is for peers that will ask somebody else


def _start(spec: ServeSpec, owner: socket.socket) -> Server:
    from ..peer.hub import Hub
    from ..peer.server import Server  # which needs what comes with an extra
    from ..peer.zmq_carrier import ZmqServerCarrier

    take_place(spec.nice, spec.affinity)
    arena = Arena.from_fd(spec.slots_fd)
    namespace = spec.namespace
    carrier = ZmqServerCarrier(spec.address, spec.credentials)
    address = Address.parse(carrier.address)
    credentials = spec.credentials
    choice = settle(spec.transport, credentials, address)
    regions = make_regions(choice, arena, address, spec.name, encrypted=credentials.encrypts)
    identity = ServerIdentity(
        fingerprint=namespace.fingerprint,
        chunk_size=namespace.chunk_size,
        check_manifest=namespace.check_manifest,
        token=credentials.token,
        offers={
            name: regions[name].metadata if name in regions else b""
            for name in transports_of(spec.transport, regions)
        },
    )
    hub = Hub(identity, spec.limits)
    for region in regions.values():
        region.serve(hub.is_wanted)
    owner.send(encode(Up(carrier.address)))
    return Server(hub, carrier, owner, arena.view, namespace.fingerprint, regions)
