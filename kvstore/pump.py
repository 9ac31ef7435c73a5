"""The idle pump: applies completions while nobody calls the store.

Completions are applied by whoever calls. Only when nobody has for :data:`IDLE` seconds, up to five times that
at the end of a busy time, does this thread take over, so that waves, cascades and deadlines go on while the
caller sleeps; a caller that polls in a busy loop never meets it. It completes and releases, and never evicts:
what a caller has just seen as HIT stays until that caller acts.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from .errors import ClosedError

__all__ = ["IDLE", "IdlePump", "Pumped"]

_log = logging.getLogger("kvstore")

#: Seconds without a call after which the pump takes over.
IDLE = 0.02
#: Largest pause in seconds while callers come and go: each look at the clock takes the interpreter from them.
_LONGEST_NAP = 4 * IDLE
#: Seconds that it waits for a completion before it looks for passed deadlines.
_TICK = 0.1


class Pumped(Protocol):
    """What the pump serves."""

    @property
    def clock(self) -> Callable[[], float]:
        """What time goes by."""

    @property
    def last_call(self) -> float:
        """When somebody called, by that clock."""

    @property
    def busy(self) -> bool:
        """Whether workers have anything to do."""

    def pump(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a completion, and apply it without evicting anything.

        Raises
        ------
        ClosedError
            There is nothing to serve any more.
        """


class IdlePump:
    """A daemon thread that serves one store for as long as the store lives."""

    def __init__(self, store: Pumped) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()  # an Event could be left locked by Ctrl-C in a caller
        self._asleep = True
        self._stopped = False
        self._store = weakref.ref(store, lambda _: self._calls.put(None))
        self._thread = threading.Thread(target=self._run, name="kvstore-pump", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is work in flight."""
        if self._asleep:
            self._calls.put(None)

    def stop(self) -> None:
        """End the thread, and wait for it unless it is the caller."""
        self._stopped = True
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        self._calls.get()
        longer = 0.0
        while not self._stopped:
            self._asleep = True
            store = self._store()
            if store is None:
                return
            pause = store.last_call + IDLE - store.clock()
            if pause <= 0 and not store.busy:
                store = None  # nobody is kept alive by one who waits for work
                self._calls.get()
                longer = 0.0
                continue
            self._asleep = False  # a caller who comes and goes need not wake it each time
            if pause > 0:
                store = None
                self._nap(min(pause + longer, _LONGEST_NAP))
                longer += pause
            else:
                longer = 0.0
                if not self._serve(store):
                    return

    def _nap(self, seconds: float) -> None:
        """Sleep, but not through :meth:`stop`."""
        with suppress(Empty):
            self._calls.get(timeout=seconds)

    def _serve(self, store: Pumped) -> bool:
        """One round; False when there will be no more."""
        try:
            store.pump(_TICK)
        except ClosedError:
            return False
        except Exception:  # whatever it was: the next call meets it, and the pump must be there after it
            _log.exception("the idle pump goes on after an error")
            self._nap(_TICK)
        return True
