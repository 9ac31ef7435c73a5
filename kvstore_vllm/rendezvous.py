"""Where the processes of one engine meet: one arena for all of them, and one identity.

The ranks come first, each in a process of its own, the scheduler last; with an in-process engine all of them
are one process. Nobody is told who creates the arena, so they elect::

    1. bind an abstract Unix socket named after the engine: whoever succeeds is the host
    2. the host makes the arena (a memfd) and answers on a thread of its own
    3. the others connect, say who they are and what they expect, and get the descriptor (SCM_RIGHTS), the
       identity and the host's facts; or one line that says why not
    4. a connection stays open as long as its member: with it goes the member's place

An abstract name goes with its socket, and a memfd with its last mapping: nothing is left behind, however the
processes end. Both ends check that the other one runs as the same user (SO_PEERCRED). A forked child closes
its copies of the sockets, for they would keep the name and the place of a parent that has died.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvstore.arena import Arena
from kvstore.errors import ClosedError, ConfigError
from kvstore.pinning import PinMode

from ._host import PROTOCOL, Answer, Host, Request, address_of, ask, connect, elect
from .identity import Identity

__all__ = ["Membership", "join"]

#: Seconds between attempts while there is no host.
_PAUSE = 0.01


class Membership:
    """A place at the rendezvous; made by :func:`join`.

    Attributes
    ----------
    arena : Arena
        This member's own mapping of the common region.
    identity : Identity
        The one that all ranks agree on.
    facts : dict
        What the host said of the engine when it created the arena.
    """

    def __init__(
        self, arena: Arena, identity: Identity, facts: Mapping[str, Any], place: socket.socket | Host
    ) -> None:
        self.arena = arena
        self.identity = identity
        self.facts = dict(facts)
        self._place = place

    def close(self) -> None:
        """Give up the place, and this member's mapping. Repeated calls do nothing."""
        self._place.close()
        self.arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def join(
    name: str,
    *,
    capacity: int,
    chunk_size: int,
    rank: int | None,
    identity: Identity | None = None,
    facts: Mapping[str, Any] | None = None,
    pin: PinMode = "off",
    timeout: float = 60.0,
) -> Membership:
    """Meet the other processes of the engine `name`.

    Parameters
    ----------
    name : str
        Tells engines on this machine apart.
    capacity, chunk_size : int
        Bytes of the arena's slots, and of a chunk; the same for all members.
    rank : int or None
        The worker's; None for the scheduler, of which there is one.
    identity : Identity, optional
        What this member's chunks are. A member that does not know waits for a host and takes its identity.
    facts : mapping, optional
        Plain data for those who come later, in case this member is the host.
    pin : {"off", "auto", "on"}
        Whether to page-lock this member's mapping for CUDA.
    timeout : float
        Seconds to wait for a host and its answer.

    Raises
    ------
    ConfigError
        The host has refused this member: its place is taken, or its identity or sizes differ. Or the name
        is another user's.
    ClosedError
        There was no host, or it did not answer in time.
    NoSpaceError
        The machine cannot hold the arena.
    """
    address = address_of(name)
    fields = None if identity is None else dict(identity.fields)
    request = Request(PROTOCOL, rank, capacity, chunk_size, fields)
    deadline = time.monotonic() + timeout
    while True:
        listener = elect(address) if identity is not None else None
        if listener is not None and identity is not None:
            return _be_host(listener, request, identity, facts or {}, pin)
        connection = connect(address)
        member = None if connection is None else _be_guest(connection, request, pin, deadline)
        if member is not None:
            return member
        if time.monotonic() > deadline:
            raise ClosedError(f"no worker of engine {name!r} has set up its host memory within {timeout:g} s")
        time.sleep(_PAUSE)


def _be_host(
    listener: socket.socket, request: Request, identity: Identity, facts: Mapping[str, Any], pin: PinMode
) -> Membership:
    """Create the arena. Who connects meanwhile waits; if this fails, they are hung up on and elect again."""
    try:
        arena = Arena.create(request.capacity, request.chunk_size, pin=pin)
    except BaseException:
        listener.close()
        raise
    answer = Answer(identity=dict(identity.fields), unknown=tuple(identity.unknown), facts=dict(facts))
    return Membership(arena, identity, facts, Host(listener, arena.fd, request, answer))


def _be_guest(
    connection: socket.socket, request: Request, pin: PinMode, deadline: float
) -> Membership | None:
    """Ask the host; None when it has gone before it answered."""
    try:
        answer, fd = ask(connection, request, max(_PAUSE, deadline - time.monotonic()))
        if answer.refusal:
            raise ConfigError(answer.refusal)
        return _admitted(connection, answer, fd, pin)
    except ConnectionError:
        connection.close()
        return None
    except TimeoutError:
        connection.close()
        raise ClosedError("the process that holds this engine's host memory does not answer") from None
    except BaseException:
        connection.close()
        raise


def _admitted(connection: socket.socket, answer: Answer, fd: int, pin: PinMode) -> Membership:
    try:
        arena = Arena.from_fd(fd, pin=pin)
    except BaseException:
        os.close(fd)
        raise
    identity = Identity(fields=answer.identity, unknown=answer.unknown)
    return Membership(arena, identity, answer.facts, connection)
