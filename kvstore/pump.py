"""The idle pump: applies completions while nobody calls the store.

Completions are applied by whoever calls. Only when nobody has for :data:`IDLE` seconds does this thread take
over, so that waves, cascades and deadlines go on while the caller sleeps; a caller that polls in a busy loop
never meets it. It completes and releases, and never evicts: what a caller has just seen as HIT stays until
that caller acts.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["IDLE", "IdlePump", "Pumped"]

_log = logging.getLogger("kvstore")

#: Seconds without a call after which the pump takes over.
IDLE = 0.02
#: Seconds that it waits for a completion before it looks for passed deadlines.
_TICK = 0.1


class Pumped(Protocol):
    """What the pump serves.

    `busy` says whether workers have anything to do, `last_call` when somebody called (by `clock`).
    """

    clock: Callable[[], float]
    last_call: float

    @property
    def busy(self) -> bool:
        """Whether workers have anything to do."""

    def pump(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a completion, and apply it without evicting anything."""


class IdlePump:
    """A daemon thread that serves one store for as long as the store lives."""

    def __init__(self, store: Pumped) -> None:
        self._work = threading.Event()
        self._store = weakref.ref(store, lambda _: self._work.set())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-pump", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is work in flight."""
        if not self._work.is_set():
            self._work.set()

    def stop(self) -> None:
        """End the thread, and wait for it unless it is the caller."""
        self._stopped.set()
        self._work.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            store = None  # nobody is kept alive by one who waits for work
            self._work.wait()
            store = self._store()
            if store is None:
                return
            if not store.busy:
                self._work.clear()
                if not store.busy:  # a look between the two may have missed new work
                    continue
            pause = store.last_call + IDLE - store.clock()
            if pause > 0:
                store = None
                self._stopped.wait(pause)
            else:
                self._serve(store)

    def _serve(self, store: Pumped) -> None:
        try:
            store.pump(_TICK)
        except Exception:  # whatever it was: the next call meets it, and the pump must be there after it
            _log.exception("the idle pump goes on after an error")
            self._stopped.wait(_TICK)
