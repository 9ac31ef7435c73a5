"""One-sided reads over NIXL, by threads that each read chunk after chunk and hash what has come.

Who owns what: the thread that uses the reader hands in what is wanted and takes what has ended. A read that
has been begun belongs to the thread that began it, which alone looks after it and lets go of it.

A read that is let go of may be written all the same, as soon as its agent works again. So an agent that had
reads under way when a connection ended, or some that failed, is closed with all that it had registered, and
there is a new one.

Where processes share memory UCX copies a chunk when its read begins, so it is hashed while the cache has it,
and two threads copy at a time. Over a network several reads of each thread are under way together.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ..doorbell import Doorbell
from ..frame import digest_of
from .nixl_agent import Agent, address_of
from .transport import NIXL, Read, Reader, Tag, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zmq

__all__ = ["NixlReader"]

#: How many read. Each copies and hashes as fast as a core can; there is seldom more than one core to spare.
_THREADS = 2
#: Reads of a thread that are under way at a time.
_AT_ONCE = 8
#: Seconds between two looks at reads that are under way; nothing tells when one has ended.
_LOOK_EVERY = 50e-6
#: Chunks that have ended before others are told, if there are more: each time costs a turn.
_TOLD = 8


class NixlReader(Reader):
    """Reads into any memory of this process; what a buffer is part of gets registered as a whole, once, and
    stays until :meth:`close`. Nothing is opened before the first server is met.

    Parameters
    ----------
    is_local : bool
        All servers are on this machine, and nobody else is to reach the agent.
    """

    name = NIXL

    def __init__(self, *, is_local: bool) -> None:
        self.is_local = is_local
        self._made: Agent | None = None
        self._server = ""
        self._failed = False  # a read over this connection has
        self._regions: dict[int, object] = {}  # id of what exports a buffer -> what keeps it where it is
        self._threads: list[threading.Thread] = []
        self._bell = Doorbell()  # rings when something has ended
        self._ended: deque[Read] = deque()
        self._changed = threading.Condition()  # guards what follows
        self._wanted: deque[Wanted] = deque()  # not begun
        self._busy = 0  # threads that may have reads under way
        self._stops = False  # whatever is under way is to be let go of
        self._let_go: list[tuple[Tag, bool]] = []  # what was, and whether NIXL has released it
        self._closes = False

    # For the thread that uses the reader.

    def attach(self, poller: zmq.Poller) -> None:
        poller.register(self._bell.fd, select.POLLIN)

    def connect(self, metadata: bytes) -> None:
        self.disconnect()
        try:
            self._server = self._agent.connect(metadata)
        except Exception as error:
            raise ConnectionError(f"NIXL does not work here: {error}") from error

    def start(self, wanted: Sequence[Wanted]) -> None:
        try:
            for read in wanted:
                self._register(read.out)
            self._start_threads()
        except Exception as error:
            self._ended += [Read(read.tag, error=f"NIXL: {error}") for read in wanted]
            self._bell.ring()
            return
        with self._changed:
            self._wanted.extend(wanted)
            self._changed.notify_all()

    def finished(self) -> list[Read]:
        self._bell.answer()
        return self._take_ended()

    def drop(self, tag: Tag) -> bool:
        with self._changed:
            left = deque(read for read in self._wanted if read.tag != tag)
            dropped = len(left) < len(self._wanted)
            self._wanted = left
        return dropped

    def disconnect(self) -> list[Tag]:
        with self._changed:
            self._wanted.clear()
            self._stops = True
            self._changed.wait_for(lambda: not self._busy)
            self._stops = False
            let_go, self._let_go = self._let_go, []
        let_go += [(read.tag, False) for read in self._take_ended() if not read.over]
        if let_go or self._failed:
            self._close_agent()
        elif self._server:
            self._agent.disconnect(self._server)
        self._server, self._failed = "", False
        return [tag for tag, released in let_go if not released]

    def close(self) -> None:
        self.disconnect()
        with self._changed:
            self._closes = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._closes = False
        self._close_agent()

    @property
    def _agent(self) -> Agent:
        if self._made is None:
            self._made = Agent(has_thread=False, is_local=self.is_local, threads=_THREADS)
        return self._made

    def _close_agent(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None
        self._regions.clear()

    def _register(self, out: memoryview) -> None:
        if id(out.obj) not in self._regions:
            whole = memoryview(out.obj)
            self._agent.register(address_of(whole), whole.nbytes)
            self._regions[id(out.obj)] = whole

    def _start_threads(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while len(self._threads) < _THREADS:
            thread = threading.Thread(target=self._work, name="kvstore-nixl", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _take_ended(self) -> list[Read]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    # The threads.

    def _work(self) -> None:
        under_way: dict[int, Wanted] = {}
        while (wanted := self._wait()) is not None:
            try:
                self._read(wanted, under_way)
            finally:
                with self._changed:  # nothing is under way, unless the thread ends by an error
                    self._let_go += [(read.tag, False) for read in under_way.values()]
                    self._busy -= 1
                    self._changed.notify_all()

    def _wait(self) -> Wanted | None:
        """The next read, and be busy from then on; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closes)
            if not self._wanted:
                return None
            self._busy += 1
            return self._wanted.popleft()

    def _next(self) -> Wanted | None:
        with self._changed:
            return self._wanted.popleft() if self._wanted else None

    def _read(self, wanted: Wanted | None, under_way: dict[int, Wanted]) -> None:
        """Read `wanted` and what else is wanted, until nothing is, and nothing is `under_way`."""
        while True:
            ended = [] if wanted is None else self._begin(wanted, under_way)
            ended += self._look(under_way)
            self._ended += ended
            if self._stops:
                self._release(under_way)
            wanted = self._next() if len(under_way) < _AT_ONCE else None
            if len(self._ended) >= (_TOLD if wanted is not None else 1):
                self._bell.ring()
            if wanted is None:
                if not under_way:
                    return
                if not ended:
                    time.sleep(_LOOK_EVERY)

    def _begin(self, wanted: Wanted, under_way: dict[int, Wanted]) -> list[Read]:
        """Begin to read; the read, if that was all."""
        tag, source, out = wanted
        try:
            handle = self._agent.prepare(self._server, source, address_of(out), out.nbytes)
        except Exception as error:
            return [Read(tag, error=f"NIXL: {error}")]
        under_way[handle] = wanted
        return self._ended_by(self._agent.begin, handle, under_way)  # if it fails some of it may have begun

    def _look(self, under_way: dict[int, Wanted]) -> list[Read]:
        """Take those out of `under_way` that have ended."""
        is_done = self._agent.is_done
        return [read for handle in list(under_way) for read in self._ended_by(is_done, handle, under_way)]

    def _ended_by(
        self, is_over: Callable[[int], bool], handle: int, under_way: dict[int, Wanted]
    ) -> list[Read]:
        """The read of `handle`, taken out of `under_way`, if this call of the agent says that it is over."""
        wanted = under_way[handle]
        try:
            if not is_over(handle):
                return []
        except Exception as error:
            self._failed = True
            read = Read(wanted.tag, error=f"NIXL: {error}", over=self._agent.release(handle))
        else:
            self._agent.release(handle)
            read = Read(wanted.tag, digest=digest_of(wanted.out))
        del under_way[handle]
        return [read]

    def _release(self, under_way: dict[int, Wanted]) -> None:
        let_go = [(wanted.tag, self._agent.release(handle)) for handle, wanted in under_way.items()]
        under_way.clear()
        with self._changed:
            self._let_go += let_go
