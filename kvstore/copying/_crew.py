"""The threads that copy chunks of one namespace.

Keys go in batches, each through these steps in one thread:

1. Ask the target which keys of the batch it has: these are skipped, and never read.
2. Read one of the others from the source; header and checksum must hold, or it is not copied.
3. Wait until the rate allows its bytes.
4. Write it to the target. The first writer wins; who loses has skipped the chunk.
5. If asked to, read it back from the target.

Who owns what: a *lane* has both backends and a buffer, and is used by one thread at a time. The caller's
thread hands batches out and takes the results in the order of the batches; few are under way at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from mmap import mmap
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from ..backends import BackendContext, connect, retryable
from ..backends.files import FileBackend
from ..config import TierConfig
from ..errors import CorruptChunkError
from ..keys import check_keys
from ..namespace import Namespace

__all__ = ["Copied", "Crew", "Route", "Space", "total"]

#: Keys of a batch.
_BATCH = 16
#: Batches that are handed out for each thread: one to work on, one to go on with.
_WINDOW = 2


class Copied(NamedTuple):
    """Outcome of a copy: every chunk that was wanted is in exactly one of the counts.

    Attributes
    ----------
    chunks, bytes : int
        What was copied; bytes of payload.
    skipped : int
        Chunks that the target had already.
    corrupt : int
        Chunks that were not copied because their bytes do not hold, at the source or when read back.
    missing : int
        Chunks that the source does not have, or no longer has.
    """

    chunks: int = 0
    bytes: int = 0
    skipped: int = 0
    corrupt: int = 0
    missing: int = 0


def total(*outcomes: Copied) -> Copied:
    """The sums of all counts."""
    return Copied(*map(sum, zip(*outcomes, strict=True)))


class Route(NamedTuple):
    """From where to where, and how; `rate` in bytes per second."""

    source: TierConfig
    target: TierConfig
    workers: int
    rate: int | None
    reads_back: bool


class Space(NamedTuple):
    """A namespace at the source, and its manifest as it stands there."""

    namespace: Namespace
    manifest: bytes

    @property
    def directory(self) -> str:
        """Name of its directory in every tier."""
        return self.namespace.directory

    def connect(self, tier: TierConfig) -> FileBackend:
        """Its backend in `tier`, not yet opened, which writes the manifest as it is where there is none."""
        own = self.namespace
        context = BackendContext(own.fingerprint, self.manifest, own.chunk_size, own.check_manifest)
        return connect(tier, context, own.directory)


class Crew:
    """Threads that copy chunks of one namespace; a context manager, which ends them however it is left."""

    def __init__(self, route: Route, space: Space) -> None:
        self._route = route
        self._space = space
        self._throttle = _Throttle(route.rate)
        self._pool = ThreadPoolExecutor(route.workers, "kvstore-copy")
        self._idle: SimpleQueue[_Lane] = SimpleQueue()
        self._lanes: list[_Lane] = []

    def __enter__(self) -> Crew:
        """Open the first lane before any batch: the target may hold the manifest of other bytes."""
        self._idle.put(self._open_lane())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the threads; after an error, without what they have not begun."""
        if kind is not None:
            self._throttle.stop()
        self._pool.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()

    def copy(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, Copied]]:
        """Copy the chunks of `keys`; yields the last key and the outcome of each batch, in order."""
        pending: deque[tuple[bytes, Future[Copied]]] = deque()
        rest = iter(keys)
        while batch := check_keys(islice(rest, _BATCH)):
            pending.append((batch[-1], self._pool.submit(self._run, batch)))
            if len(pending) > _WINDOW * self._route.workers:
                yield _settle(pending)
        while pending:
            yield _settle(pending)

    def _run(self, batch: list[bytes]) -> Copied:
        try:
            lane = self._idle.get_nowait()
        except Empty:
            lane = self._open_lane()
        outcome = lane.copy(batch)
        self._idle.put(lane)
        return outcome

    def _open_lane(self) -> _Lane:
        lane = _Lane(self._route, self._space, self._throttle)
        self._lanes.append(lane)
        return lane


def _settle(pending: deque[tuple[bytes, Future[Copied]]]) -> tuple[bytes, Copied]:
    key, future = pending.popleft()
    return key, future.result()


class _Lane:
    """Both backends, open, and a buffer for one chunk."""

    def __init__(self, route: Route, space: Space, throttle: _Throttle) -> None:
        self._throttle = throttle
        self._reads_back = route.reads_back
        self._buffer = memoryview(mmap(-1, space.namespace.chunk_size))
        with ExitStack() as opened:
            self._source = opened.enter_context(closing(space.connect(route.source)))
            self._source.attach()  # opening would create what is missing: the source is left as it is
            self._target = opened.enter_context(closing(space.connect(route.target)))
            self._target.open()
            self._opened = opened.pop_all()
        self._at_source = _retrying(route.source, self._source)
        self._at_target = _retrying(route.target, self._target)

    def close(self) -> None:
        self._opened.close()

    def copy(self, batch: list[bytes]) -> Copied:
        there = self._at_target(self._target.exists, batch)
        moved = (self._move(key) for key, found in zip(batch, there, strict=True) if not found)
        return total(Copied(skipped=sum(there)), *moved)

    def _move(self, key: bytes) -> Copied:
        try:
            length = self._at_source(self._source.read_into, key, self._buffer)
        except CorruptChunkError:
            return Copied(corrupt=1)
        if length is None:
            return Copied(missing=1)
        self._throttle.wait_for(length)
        if not self._at_target(self._target.write, key, self._buffer[:length]):
            return Copied(skipped=1)
        if self._reads_back and not self._holds(key):
            return Copied(corrupt=1)
        return Copied(1, length)

    def _holds(self, key: bytes) -> bool:
        """Whether the target gives back what it was given; what does not hold is deleted there."""
        try:
            return self._at_target(self._target.read_into, key, self._buffer) is not None
        except CorruptChunkError:
            self._at_target(self._target.delete, [key])
            return False


class _Throttle:
    """Keeps all lanes together below a rate, and stops them."""

    def __init__(self, rate: int | None) -> None:
        from ..repair import Pace  # which brings the scanner: opening a store has no use for that

        self._stopped = threading.Event()
        self._turn = threading.Lock()
        self._pace = None if rate is None else Pace(rate, sleep=self._stopped.wait)

    def stop(self) -> None:
        self._stopped.set()

    def wait_for(self, size: int) -> None:
        """Return when `size` bytes may be copied; raise when nothing is to be copied any more."""
        if self._pace is not None:
            with self._turn:
                self._pace(size)
        if self._stopped.is_set():
            raise CancelledError


def _retrying(tier: TierConfig, backend: FileBackend) -> Callable[..., Any]:
    """Calls a verb, again where its error may pass and the backend's client repeats nothing itself."""
    return Retrying(
        retry=retry_if_exception(retryable),
        stop=stop_after_attempt(1 if backend.capabilities.retries else 1 + tier.retries),
        wait=wait_random_exponential(multiplier=0.01, max=max(0.01, tier.timeout / 8)),
        reraise=True,
    )
