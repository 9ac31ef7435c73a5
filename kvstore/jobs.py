"""Jobs: what a caller holds while something goes on in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from .errors import ClosedError
from .serving import Serving

__all__ = ["Job", "Prefetched"]

_T = TypeVar("_T")

#: Seconds after which an awaiting coroutine looks for deadlines that have passed.
_TICK = 0.05


class Prefetched(NamedTuple):
    """Outcome of a prefetch; every key asked for is in exactly one of the three, in the order asked for.

    Attributes
    ----------
    promoted : tuple of bytes
        Brought into host memory.
    missing : tuple of bytes
        In no tier that answered.
    skipped : tuple of bytes
        Left alone: in host memory before, or no room without evicting what the same job had promoted.
    """

    promoted: tuple[bytes, ...]
    missing: tuple[bytes, ...]
    skipped: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Sequence[bytes], promoted: Sequence[bytes], missing: Sequence[bytes]) -> Prefetched:
        """Sort `keys` by what became of them; what was neither promoted nor missing was skipped."""
        if len(promoted) == len(keys):
            return cls(tuple(keys), (), ())
        up, gone = set(promoted), set(missing)
        rest = set(keys) - up - gone
        return cls(
            *(tuple([key for key in keys if key in which]) if which else () for which in (up, gone, rest))
        )


class Job(Generic[_T]):
    """An asynchronous set of transfers.

    It can be waited for with :meth:`result`, or awaited in any asyncio event loop; :attr:`future` is for
    whatever takes a :class:`concurrent.futures.Future`.

    Parameters
    ----------
    store : Serving
    over : callable
        Whether it has ended; called in a turn of the store, which settles the job before it is over.
    stop : callable
        Starts no more of it; called in a turn.
    """

    def __init__(self, store: Serving, over: Callable[[], bool], stop: Callable[[], None]) -> None:
        self._store = store
        self._over = over
        self._stop = stop
        self._outcome: Callable[[], _T] | None = None
        self._future: Future[_T] | None = None  # made on demand: its lock is not safe from Ctrl-C

    @property
    def future(self) -> Future[_T]:
        """The job as a future; it ends when somebody serves the store, as the idle pump does."""
        with self._store._lock:
            if self._future is None:
                self._future = Future()
                self._tell()
            return self._future

    def settle(self, outcome: Callable[[], _T]) -> None:
        """End it, unless it has ended: ``outcome()`` returns or raises what :meth:`result` does. With the
        store's lock held."""
        if self._outcome is None:
            self._outcome = outcome
            self._tell()

    def done(self) -> bool:
        """Whether it has ended; looks for completions, and does not wait."""
        if self._outcome is None:
            self._store.poll()
        return self._outcome is not None

    def cancel(self) -> bool:
        """Start no more transfers; those under way still end. False when the job had ended."""
        with self._store._lock:
            if self._outcome is not None:
                return False
            self.settle(_cancelled)
        self._store._step(self._stop)
        return True

    def result(self, timeout: float | None = None) -> _T:
        """The outcome.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None waits for as long as the tiers' own deadlines allow.

        Raises
        ------
        TimeoutError
            It has not ended within `timeout`; it goes on.
        concurrent.futures.CancelledError
            It was cancelled.
        ClosedError
            The store was closed.
        """
        if self._outcome is None:
            self._store.wait_until(self._over, timeout)
        if self._outcome is None:
            raise TimeoutError(f"not done after {timeout} s")
        return self._outcome()

    def _tell(self) -> None:
        """Bring the future to the state of the job."""
        if self._future is None or self._outcome is None:
            return
        with suppress(InvalidStateError):  # cancelled behind our back
            try:
                self._future.set_result(self._outcome())
            except CancelledError:
                self._future.cancel()
            except ClosedError as error:
                self._future.set_exception(error)

    def __await__(self) -> Generator[Any, None, _T]:
        return self._await().__await__()

    async def _await(self) -> _T:
        """Poll the store from the event loop whenever its engine has something to report."""
        import asyncio  # slow to import, and whoever awaits has it

        if self._outcome is None:
            loop = asyncio.get_running_loop()
            waiter = asyncio.wrap_future(self.future)
            waiter.add_done_callback(lambda w: w.cancelled() or w.exception())  # told by the future itself
            fd = os.dup(self._store.fileno())  # a loop knows one reader for each descriptor
            loop.add_reader(fd, self._look)
            try:
                self._look()
                while not waiter.done():
                    await asyncio.wait([waiter], timeout=_TICK)
                    self._look()
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return self.result(timeout=0)

    def _look(self) -> None:
        with suppress(ClosedError):  # then the job says so
            self._store.poll()
            while self._store.resting:
                self._store.poll()


def _cancelled() -> NoReturn:
    raise CancelledError
