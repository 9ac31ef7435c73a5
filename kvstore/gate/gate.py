"""The owner's side of serving: lends slots to the serving process, takes them back, and starts it again.

Who owns what: the store's lock-holder calls :meth:`Gate.serve` and :meth:`Gate.notify`, in every turn; the
idle pump does when nobody else calls, woken by the descriptor. The nursery's thread starts and reaps the
process. A process that has ended has no leases from the moment its end is noted; one that gives no sign of
life is killed.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from dataclasses import dataclass, field, replace

from ..address import Address
from ..arena import Arena
from ..catalog import Catalog
from ..doorbell import Doorbell
from ..engine.nursery import Child, Nursery, hang_up
from ..errors import BackendError
from ..namespace import Namespace
from ..peer.choice import Choice
from ..peer.credentials import ServerCredentials
from ..peer.limits import Limits
from ..peer.link import (
    BEAT,
    LINK_LIMIT,
    Ask,
    Beat,
    Down,
    Forget,
    FromOwner,
    FromServer,
    Release,
    Up,
    decode_from_server,
    encode,
)
from .books import Books
from .process import ServeSpec

__all__ = ["Gate"]

_log = logging.getLogger("kvstore")

#: Seconds that a fresh process may take until it listens.
_START_UP = 10.0
#: Seconds without a sign of life until a process counts as hung.
_SILENCE = 5 * BEAT
#: Messages taken in one turn at most: more would keep the caller.
_TURN = 32


@dataclass(eq=False)
class _Link:
    """One serving process."""

    child: Child
    books: Books
    heard: float
    up: bool = False
    error: str = ""
    lost: bool = False  # it was killed
    backlog: deque[FromOwner] = field(default_factory=deque)


class Gate:
    """Lets peers read an arena.

    Parameters
    ----------
    address : Address
        Where to listen.
    arena : Arena
    catalog : Catalog
        The store's; its lock guards this object, too.
    namespace : Namespace
    credentials : ServerCredentials
    transport : {"auto", "zmq", "nixl"}
        How chunks go to peers.
    engine_fd : int
        The engine's descriptor, to be waited on together with the gate's own.
    counters : dict
        Where to count what the serving process reports.
    limits : Limits
    nice, affinity
        Place of the process, as for workers.

    Attributes
    ----------
    address : Address
        Where it listens; with the port that it got, once it is open.
    """

    def __init__(
        self,
        address: Address,
        arena: Arena,
        catalog: Catalog,
        namespace: Namespace,
        credentials: ServerCredentials,
        *,
        transport: Choice = "auto",
        engine_fd: int,
        counters: dict[str, float],
        limits: Limits | None = None,
        nice: int | None = None,
        affinity: tuple[int, ...] | None = None,
    ) -> None:
        self.address = address
        self._catalog = catalog
        self._counters = counters
        self._specs = [
            ServeSpec(
                number=0,
                parent=os.getpid(),
                slots_fd=arena.fd,
                jobs_fd=-1,
                address=address,
                namespace=namespace,
                credentials=credentials,
                limits=limits or Limits(),
                transport=transport,
                nice=nice,
                affinity=affinity,
            )
        ]
        self._bell = Doorbell()
        self._epoll = select.epoll()
        self._epoll.register(engine_fd, select.EPOLLIN)
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        self._nursery = Nursery(self._specs, self._bell)
        self._links: dict[int, _Link] = {}  # by number of the process
        self._message = memoryview(bytearray(LINK_LIMIT))
        if not (credentials.asks or address.is_loopback):
            _log.warning(
                "serving on %s without authentication: whoever reaches it and knows the namespace may read; "
                "set a token or curve keys, or serve on 127.0.0.1",
                address,
            )

    def open(self) -> None:
        """Start the process, and wait until it listens.

        Raises
        ------
        BackendError
            It cannot listen.
        """
        link = self._adopt(self._nursery.spawn(0))
        self._nursery.watch()
        poller = select.poll()
        for fd in (link.child.jobs.fileno(), self._bell.fd):
            poller.register(fd, select.POLLIN)
        deadline = time.monotonic() + _START_UP
        while not link.up:
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            self.serve()
            gone = link.child.number not in self._links
            if link.error or gone or time.monotonic() >= deadline:
                why = link.error or ("its process ended" if gone else "its process does not answer")
                raise BackendError(f"cannot serve peers on {self.address}: {why}")

    def fileno(self) -> int:
        """A descriptor that is readable while the engine or the gate has something to do."""
        return self._epoll.fileno()

    def wait(self, timeout: float) -> None:
        """Return when the descriptor is readable, or after `timeout` seconds; any thread may wait."""
        poller = select.poll()
        poller.register(self._epoll.fileno(), select.POLLIN)
        poller.poll(max(0.0, timeout) * 1000)

    def serve(self) -> bool:
        """Take in what the serving process asks; True when slots came free."""
        now = time.monotonic()
        freed = self._take_notes() if self._bell.rung else False
        for link in list(self._links.values()):
            taken = 0
            while not link.backlog and taken < _TURN and (message := self._receive(link)) is not None:
                taken += 1
                link.heard = now
                freed = self._hear(link, message) or freed
            self._send(link)
            if taken < _TURN and now - link.heard > _SILENCE + (0 if link.up else _START_UP):
                self._kill(link)
        return freed

    def notify(self) -> None:
        """Tell of chunks that peers wait for, and that have come meanwhile."""
        for link in self._links.values():
            news = link.books.news(time.monotonic())
            if news:
                link.backlog.extend(news)
                self._send(link)

    @property
    def leases(self) -> int:
        """Leases that serving processes have."""
        return sum(link.books.held.total() for link in self._links.values())

    @property
    def pids(self) -> list[int]:
        """Process ids of the serving processes."""
        return [link.child.process.pid for link in self._links.values()]

    def close(self, timeout: float) -> None:
        """End the process; a close that was interrupted can be called again."""
        self._nursery.close(timeout)
        self._epoll.close()
        self._bell.close()

    # Processes.

    def _adopt(self, child: Child) -> _Link:
        link = _Link(child, Books(self._catalog), time.monotonic())
        self._links[child.number] = link
        self._epoll.register(child.jobs, select.EPOLLIN)
        return link

    def _take_notes(self) -> bool:
        self._bell.answer()
        freed = False
        # In this order: whoever is noted as dead was noted as born before.
        dead = [self._nursery.dead.popleft() for _ in range(len(self._nursery.dead))]
        while self._nursery.born:
            self._adopt(self._nursery.born.popleft())
        for child in dead:
            link = self._links.pop(child.number)
            while (last_words := self._receive(link)) is not None:
                self._hear(link, last_words)
            freed = freed or bool(link.books.held)
            link.books.close()
            self._epoll.unregister(child.jobs)
            hang_up(child.jobs)
            why = link.error or f"exit code {child.process.returncode}"
            _log.warning("the process that serves peers on %s has ended (%s)", self.address, why)
            self._count("deaths", 1)
        return freed

    def _kill(self, link: _Link) -> None:
        if not link.lost:
            link.lost = True
            _log.warning("the process that serves peers on %s hangs: it is replaced", self.address)
            self._nursery.replace(link.child)

    # The link.

    def _receive(self, link: _Link) -> FromServer | None:
        try:
            size = link.child.jobs.recv_into(self._message)
        except (BlockingIOError, ConnectionError):
            return None
        return decode_from_server(self._message[:size]) if size else None  # its end will be noted

    def _hear(self, link: _Link, message: FromServer) -> bool:
        """Act on a message; True when slots came free."""
        if isinstance(message, Ask):
            link.backlog.append(link.books.answer(message))
            self._send(link)
        elif isinstance(message, Release):
            link.books.release(message.slots)
            return True
        elif isinstance(message, Forget):
            link.books.forget(message.ticket)
        elif isinstance(message, Beat):
            for name, count in message.counters.items():
                self._count(name, count)
        elif isinstance(message, Up):
            link.up = True
            self.address = Address.parse(message.address)
            self._specs[0] = replace(self._specs[0], address=self.address)
        elif isinstance(message, Down):
            link.error = message.error
        return False

    def _send(self, link: _Link) -> None:
        """Send as much as the socket takes; until the rest has gone, nothing more is heard."""
        try:
            while link.backlog:
                link.child.jobs.send(encode(link.backlog[0]))
                link.backlog.popleft()
        except BlockingIOError:
            pass
        except ConnectionError:
            link.backlog.clear()

    def _count(self, name: str, count: int) -> None:
        name = f"peer_{name}"
        self._counters[name] = self._counters.get(name, 0.0) + count
