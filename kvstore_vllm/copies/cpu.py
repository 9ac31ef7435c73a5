"""Copies between blocks in this process's memory and slots, on a thread of their own.

Thread: `start` and `close` belong to the caller; the copy thread takes jobs, loads before stores, since a
request waits for its load. Both sides share only the two queues, under one condition.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvstore.arena import Arena

from ..acks import Direction
from .base import Copier, Transfer
from .layout import Placed, RowLayout
from .strided import Blanks, block_runs, device_bands

__all__ = ["CpuCopier"]

#: Seconds that the copy thread needs to take the interpreter when it is offered.
_MOMENT = 0.0001


class CpuCopier(Copier):
    """The copier for tensors in host memory.

    Parameters
    ----------
    layout : RowLayout
    arena : Arena
        Stays open until `close`.
    """

    def __init__(self, layout: RowLayout, arena: Arena) -> None:
        self._bands = [device_bands(group, layout, arena) for group in layout.groups]
        self._blanks = [Blanks(group, layout, arena) for group in layout.groups]
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="kvstore-copies", daemon=True)
        self._thread.start()

    def start(self, direction: Direction, groups: Sequence[Placed]) -> Transfer:
        """See `Copier.start`."""
        job = _Job(direction, groups)
        with self._changed:
            (self._loads if direction == "load" else self._stores).append(job)
            self._changed.notify()
        return job

    def close(self) -> None:
        """See `Copier.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._bands.clear()
        self._blanks.clear()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            started = time.perf_counter()
            try:
                for placed in job.groups:
                    job.nbytes += self._copy(job.direction, placed)
            except Exception as error:
                job.error = error
            job.duration = time.perf_counter() - started
            job.ended.set()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._stores or self._closing)
            queue = self._loads or self._stores
            return queue.popleft() if queue else None

    def _copy(self, direction: Direction, placed: Placed) -> int:
        """Copy the blocks of one group; the number of bytes."""
        storing = direction == "store"
        if storing:
            self._blanks[placed.group].clear(placed)
        nbytes = 0
        for (writers, turn), bands in self._bands[placed.group].items():
            mine = placed.turn(writers, turn) if storing else placed
            for block, slot in block_runs(mine):
                for band in bands:
                    device, host = band.device[block], band.host[slot]
                    np.copyto(host, device) if storing else np.copyto(device, host)
                    nbytes += device.nbytes
        return nbytes


class _Job(Transfer):
    def __init__(self, direction: Direction, groups: Sequence[Placed]) -> None:
        self.direction: Direction = direction
        self.groups = groups
        self.nbytes = 0
        self.error: Exception | None = None
        self.duration = 0.0
        self.ended = threading.Event()

    def done(self) -> bool:
        # Blocking, if only for a moment: a caller who asks in a loop, and gives up the interpreter for no
        # longer than a system call takes, is back before the copy thread has woken, again and again.
        return self.ended.wait(_MOMENT)

    def wait(self) -> None:
        self.ended.wait()

    def seconds(self) -> float:
        if self.error is not None:
            raise self.error
        return self.duration
