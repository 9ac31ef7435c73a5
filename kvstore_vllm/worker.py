"""The rank's side of the adapter: vLLM's jobs, copied in order, and acknowledged to the scheduler.

Thread: vLLM's worker thread calls everything here; what is asynchronous is the copier's business.

vLLM asserts that every job succeeds. So a store that fails is reported to it as done, and recorded in the
acknowledgement words, where the manager finds it and drops the slots instead of publishing them. A load that
fails leaves the engine without the KV it counts on, which nothing can mend: it raises.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvstore.arena import Arena

from .acks import AckWords, Direction
from .copies import Copier, RowLayout, Transfer
from .specs import SlotSpec

__all__ = ["KVStoreWorker"]

_log = logging.getLogger(__name__)


class _Job(NamedTuple):
    number: int
    ticket: int
    transfer: Transfer | None  # None: there is nothing to copy


class _Finished:
    """Tickets that have finished, in whatever order: vLLM flushes some jobs ahead of earlier ones."""

    def __init__(self) -> None:
        self.up_to = 0
        self._beyond: set[int] = set()

    def add(self, ticket: int) -> int:
        """Highest ticket such that it and all before it have finished."""
        self._beyond.add(ticket)
        while self.up_to + 1 in self._beyond:
            self.up_to += 1
            self._beyond.remove(self.up_to)
        return self.up_to


class KVStoreWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between this rank's blocks and the arena's slots.

    Parameters
    ----------
    arena : Arena
        Stays open until `shutdown`; the owner closes it.
    layout : RowLayout
    copier : Copier
    acks : AckWords
        Both become the worker's own.
    rank : int
    """

    def __init__(self, arena: Arena, layout: RowLayout, copier: Copier, acks: AckWords, rank: int) -> None:
        self._slots = arena.slots
        self._layout = layout
        self._copier = copier
        self._acks = acks
        self._rank = rank
        self._jobs: dict[Direction, deque[_Job]] = {"store": deque(), "load": deque()}
        self._finished: dict[Direction, _Finished] = {"store": _Finished(), "load": _Finished()}
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: SlotSpec) -> bool:
        """Start copying blocks to slots."""
        transfer = None
        if self._layout.stores:
            try:
                placement = self._layout.place(src_spec, dst_spec.slots, self._slots)
                if not placement.whole:
                    self._fail(dst_spec.ticket, "a block in the middle of a chunk was not given")
                transfer = self._copier.start("store", placement.groups)
            except Exception as error:
                self._fail(dst_spec.ticket, error)
        self._jobs["store"].append(_Job(job_id, dst_spec.ticket, transfer))
        return True

    def submit_load(
        self, job_id: int, src_spec: SlotSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Start copying slots to blocks; `expedited` (0.33) changes nothing: loads go first anyway.

        Raises
        ------
        ValueError
            The job names blocks or slots that do not exist, or its groups and chunks do not match.
        """
        placement = self._layout.place(dst_spec, src_spec.slots, self._slots)
        transfer = self._copier.start("load", placement.groups)
        self._jobs["load"].append(_Job(job_id, src_spec.ticket, transfer))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have finished since the last call; all of them successes to vLLM.

        Raises
        ------
        RuntimeError
            A load failed.
        """
        self._settle()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of `job_ids` has anything left to copy, and their tickets are acknowledged."""
        for jobs in self._jobs.values():
            for job in jobs:
                if job.number in job_ids and job.transfer is not None:
                    job.transfer.wait()
        self._settle()

    def shutdown(self) -> None:
        """Finish what is being copied, and start nothing more."""
        self._copier.close()
        self._settle()
        self._acks.close()

    def _settle(self) -> None:
        for direction, jobs in self._jobs.items():
            while jobs and (jobs[0].transfer is None or jobs[0].transfer.done()):
                self._end(direction, jobs.popleft())

    def _end(self, direction: Direction, job: _Job) -> None:
        nbytes, seconds = 0, 0.0
        if job.transfer is not None:
            try:
                seconds = job.transfer.seconds()
                nbytes = job.transfer.nbytes
            except Exception as error:
                if direction == "load":
                    raise RuntimeError(f"KV blocks could not be loaded: {error}") from error
                self._fail(job.ticket, error)
        self._acks.acknowledge(self._rank, direction, self._finished[direction].add(job.ticket))
        self._results.append(
            TransferResult(job_id=job.number, success=True, transfer_size=nbytes, transfer_time=seconds)
        )

    def _fail(self, ticket: int, reason: object) -> None:
        self._acks.fail(self._rank, ticket)
        _log.warning("rank %d: the chunks of store %d are not kept: %s", self._rank, ticket, reason)
