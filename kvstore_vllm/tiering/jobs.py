"""Jobs of vLLM: many chunks, each of which ends by itself; the job ends with the last of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Job", "Jobs"]


@dataclass(eq=False)
class Job:
    """One job.

    Attributes
    ----------
    id : int
        vLLM's.
    keys : sequence of bytes
        As vLLM gave them.
    started : float
        Seconds, monotonic.
    good : list of int
        Places in `keys` of what has been moved, or was there.
    left : int
        Chunks that have not ended.
    moved : int
        Bytes read or written; none for chunks that needed no transfer.
    seconds : float
        Until the last chunk ended.
    """

    id: int
    keys: Sequence[bytes]
    started: float
    good: list[int] = field(default_factory=list)
    left: int = 0
    moved: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """All chunks are to come."""
        self.left = len(self.keys)

    @property
    def complete(self) -> bool:
        """Whether every chunk has been moved."""
        return len(self.good) == len(self.keys)

    @property
    def good_keys(self) -> list[bytes]:
        """Those of `keys` that have been moved."""
        return [self.keys[place] for place in self.good]


class Jobs:
    """Jobs under way, and those that have ended since somebody asked.

    Parameters
    ----------
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.active = 0
        self._clock = clock
        self._ended: deque[Job] = deque()

    def start(self, job_id: int, keys: Sequence[bytes]) -> Job:
        """A job begins; one without chunks ends at once."""
        job = Job(job_id, keys, self._clock())
        self.active += 1
        if not job.left:
            self._end(job)
        return job

    def settle(self, job: Job, place: int, good: bool, moved: int = 0) -> None:
        """The chunk at `place` has ended, well or not, after so many bytes were moved."""
        if good:
            job.good.append(place)
        job.moved += moved
        job.left -= 1
        if not job.left:
            self._end(job)

    def take(self) -> list[Job]:
        """Jobs that have ended since the last call."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def _end(self, job: Job) -> None:
        self.active -= 1
        job.seconds = self._clock() - job.started
        self._ended.append(job)
