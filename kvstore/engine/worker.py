"""What a worker does with a batch: the same code in every engine.

A worker belongs to one tier and has a backend of its own. It turns every fault of the storage into the
result of an item; nothing that a backend raises leaves this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from ..backends import retryable
from ..backends.base import Backend
from ..collect.collector import Collector
from ..collect.report import Report
from ..errors import CorruptChunkError
from .base import Batch, Completion, Result, Status, Verb, answer_all
from .crew import Crew

__all__ = ["Worker"]

#: Results are reported at least this often (seconds): every report costs worker and caller a turn.
_REPORT_EVERY = 0.02
#: Seconds after which a read is reported at once: others may take as long, and the head of a batch is usable
#: before its tail has come. Nobody waits for the head of a batch of writes.
_LONG_READ = 0.005
#: Seconds between two looks for what cannot wait until the batch has ended.
_LOOK_EVERY = 0.001
#: Seconds that a part of a probe or a delete may take to be followed by a larger one.
_SHORT_PART = 0.01
#: Characters of an error that are reported.
_LONGEST_ERROR = 500
#: Keys of the first part of a probe or a delete.
_FIRST_PART = 64
#: Keys in a row that fail alone before the rest of their part counts as failed, too.
_ENOUGH_FAILURES = 3
#: Rows of a scan in one completion.
_ROWS = 2048

_T = TypeVar("_T")
_Emit = Callable[[Completion], None]
_Outcomes = Iterator[int | Exception | None]
_Joining = Callable[[Batch, Collection[Verb]], Batch | None]
_OnKeys = Callable[[list[bytes]], list[Result]]


def _nothing(_running: Batch, _verbs: Collection[Verb]) -> None:
    """There is nothing else."""


class Worker:
    """Executes the batches of one tier.

    Parameters
    ----------
    backend : Backend
        Opened here, by the thread that will use it.
    view : callable
        ``view(slot)``: writable memory of one host slot.
    retries : int
        Further attempts at an operation whose error is retryable, with jittered exponential back-off; none
        where the backend's client has retries of its own.
    timeout : float
        Seconds within which attempts are made.
    concurrency : int
        Operations at a time; more than one only helps where an operation mostly waits, and the backend does
        not see to it by itself.
    collector : Collector, optional
        Takes the turns that a COLLECT asks for.
    has_quick_probes : bool
        A batch of probes takes so little time that it may come between two transfers.
    begins_ahead : bool
        What has been taken is lost together: a batch may be begun while another is under way.
    """

    def __init__(
        self,
        backend: Backend,
        view: Callable[[int], memoryview],
        *,
        retries: int = 0,
        timeout: float = 10.0,
        concurrency: int = 1,
        collector: Collector | None = None,
        has_quick_probes: bool = False,
        begins_ahead: bool = False,
    ) -> None:
        if backend.capabilities.retries:
            retries = 0
        self._backend = backend
        self._view = view
        self._collector = collector
        self._opened = False
        self._address = ""
        self._has_quick_probes = has_quick_probes
        self._begins_ahead = begins_ahead and backend.capabilities.overlaps
        self._ahead: Batch | None = None  # reads that have been begun and not executed
        self._begun: dict[int, _Outcomes] = {}  # by the id of such a batch
        self._crew = Crew(concurrency, "kvstore-io") if concurrency > 1 else None
        self._retrying = Retrying(
            retry=retry_if_exception(retryable),
            stop=stop_after_attempt(retries) | stop_after_delay(timeout / 2)
            if retries
            else stop_after_attempt(1),
            wait=wait_random_exponential(multiplier=0.01, max=max(0.01, timeout / 8)),
            reraise=True,
        )
        self._retries = retries

    def open(self) -> None:
        """Open the backend; raises what it raises."""
        self._backend.open()
        self._opened = True

    def close(self) -> None:
        """Close the backend; its errors no longer concern anybody."""
        if self._crew is not None:
            self._crew.close()
        try:
            if self._collector is not None:
                self._collector.close()
            self._backend.close()
        except Exception:  # the store is closing: there is nobody left to tell
            pass

    def run(self, batch: Batch, emit: _Emit, joining: _Joining = _nothing) -> None:
        """Execute `batch`; `emit` gets a result for each item.

        Between two transfers ``joining(batch, verbs)`` may give it another of these verbs. Probes that take
        little time are executed at once, for who asks where chunks are should not wait until others have
        theirs. Reads of a backend that overlaps batches are begun, and executed afterwards.
        """
        following: Batch | None = batch
        while following is not None:
            self._execute(following, emit, joining)
            following, self._ahead = self._ahead, None

    def _execute(self, batch: Batch, emit: _Emit, joining: _Joining) -> None:
        try:
            if not self._opened:  # the tier was down at start
                self.open()
            if batch.address != self._address:
                self._address = batch.address
                self._backend.dial(batch.address)
            self._run(batch, emit, joining)
        except Exception as error:
            emit(answer_all(batch, _failed(error)))

    def _run(self, batch: Batch, emit: _Emit, joining: _Joining) -> None:
        if batch.verb is Verb.PROBE:
            self._in_parts(batch, self._probe, emit)
        elif batch.verb is Verb.DELETE:
            self._in_parts(batch, self._delete, emit)
        elif batch.verb is Verb.SCAN:
            self._scan(batch, emit)
        elif batch.verb is Verb.COLLECT:
            self._collect(batch, emit)
        else:
            self._transfer(batch, emit, joining)

    def _in_parts(self, batch: Batch, verb: _OnKeys, emit: _Emit) -> None:
        """Let `verb` work on as many keys at a time as take little time, and report after each part."""
        at_once = batch.verb is Verb.PROBE and self._backend.capabilities.bulk_exists
        first, size = 0, len(batch.keys) if at_once else _FIRST_PART
        while first < len(batch.keys):
            started = time.perf_counter()
            results = self._on_keys(verb, batch.keys[first : first + size])
            emit(Completion(batch.id, first, results, [], self._counters()))
            first += len(results)
            if time.perf_counter() - started < _SHORT_PART:
                size *= 4

    def _on_keys(self, verb: _OnKeys, keys: list[bytes]) -> list[Result]:
        """Results of `verb`; where it fails for all of `keys` at once, it is asked key by key.

        A key that fails alone is no reason to give up the others; several in a row are.
        """
        try:
            return verb(keys)
        except Exception as error:
            if len(keys) == 1:
                return [_failed(error)]
        results: list[Result] = []
        for key in keys:
            results += self._on_keys(verb, [key])
            if [result.status for result in results[-_ENOUGH_FAILURES:]] == [
                Status.FAILED
            ] * _ENOUGH_FAILURES:
                return results + results[-1:] * (len(keys) - len(results))
        return results

    def _probe(self, keys: list[bytes]) -> list[Result]:
        started = time.perf_counter()
        found = self._attempt(self._backend.exists, keys)
        each = (time.perf_counter() - started) / len(keys)
        return [Result(Status.OK if there else Status.MISSING, 0, each) for there in found]

    def _delete(self, keys: list[bytes]) -> list[Result]:
        self._attempt(self._backend.delete, keys)
        return [Result(Status.OK)] * len(keys)

    def _scan(self, batch: Batch, emit: _Emit) -> None:
        rows = iter(self._backend.scan())
        while some := [(row.key, row.size, row.mtime) for row in islice(rows, _ROWS)]:
            emit(Completion(batch.id, 0, [], some, {}))
        emit(answer_all(batch, Result(Status.OK)))

    def _collect(self, batch: Batch, emit: _Emit) -> None:
        assert self._collector is not None
        started = time.perf_counter()
        answer = self._collector.turn(Report.unpack(batch.keys[0]))
        rows = iter(answer.rows())
        while some := list(islice(rows, _ROWS)):
            emit(Completion(batch.id, 0, [], some, {}))
        emit(answer_all(batch, Result(Status.OK, answer.granted, time.perf_counter() - started)))

    def _transfer(self, batch: Batch, emit: _Emit, joining: _Joining) -> None:
        long = _LONG_READ if batch.verb is Verb.READ else _REPORT_EVERY
        first, results = 0, []
        reported = before = looked = time.perf_counter()
        for result in self._moved(batch):
            results.append(result)
            now = time.perf_counter()
            if now - reported >= _REPORT_EVERY or now - before >= long:
                emit(Completion(batch.id, first, results, [], self._counters()))
                first, results, reported = first + len(results), [], now
            before = now
            if now - looked >= _LOOK_EVERY:
                looked = now
                welcome = self._welcome(batch)
                other = joining(batch, welcome) if welcome else None
                if other is None:
                    continue
                if results:  # they need not wait, and the batch has its time from the last report
                    emit(Completion(batch.id, first, results, [], self._counters()))
                    first, results, reported = first + len(results), [], now
                self._join(other, emit)
        if results:
            emit(Completion(batch.id, first, results, [], self._counters()))

    def _welcome(self, running: Batch) -> tuple[Verb, ...]:
        """Verbs of what may be begun before `running` has ended."""
        if self._is_bulk(running):
            may_begin = self._begins_ahead and self._ahead is None
            return (Verb.PROBE, Verb.READ)[: self._begins_ahead + may_begin]
        return (Verb.PROBE,) if self._has_quick_probes else ()

    def _join(self, other: Batch, emit: _Emit) -> None:
        """Execute probes; begin with reads."""
        if other.verb is Verb.PROBE:
            self._execute(other, emit, _nothing)
            return
        try:
            self._begun[other.id] = self._begin(other)
        except Exception as error:
            emit(answer_all(other, _failed(error)))
        else:
            self._ahead = other

    def _is_bulk(self, batch: Batch) -> bool:
        return batch.verb is Verb.READ and self._backend.capabilities.bulk_read

    def _begin(self, batch: Batch) -> _Outcomes:
        return self._backend.read_many(batch.keys, [self._view(slot) for slot in batch.slots])

    def _moved(self, batch: Batch) -> Iterable[Result]:
        """Result by result, in order."""
        if self._is_bulk(batch):
            return self._read_many(batch, self._take_outcomes(batch))
        move = self._read if batch.verb is Verb.READ else self._write
        mapper = map if self._crew is None else self._crew.map
        return mapper(move, batch.keys, [self._view(slot) for slot in batch.slots], batch.lengths)

    def _take_outcomes(self, batch: Batch) -> _Outcomes:
        """Those of `batch`, which may have been begun ahead. If all of it has failed meanwhile, with the
        connection that another one has broken, it is begun once more."""
        outcomes = self._begun.pop(batch.id, None)
        if outcomes is None:
            return self._begin(batch)
        first = next(outcomes)
        if not (isinstance(first, Exception) and retryable(first)):
            return chain([first], outcomes)
        known = [first, *outcomes]  # so nothing of it is under way
        if all(isinstance(outcome, Exception) and retryable(outcome) for outcome in known):
            return self._begin(batch)
        return iter(known)

    def _read_many(self, batch: Batch, outcomes: _Outcomes) -> Iterator[Result]:
        """Leave all of it to the backend. What fails is repeated alone, until several in a row have failed
        again."""
        failures, before = 0, time.perf_counter()
        for outcome, key, slot in zip(outcomes, batch.keys, batch.slots, strict=True):
            final = outcome
            if isinstance(outcome, Exception) and failures < _ENOUGH_FAILURES and self._may_repeat(outcome):
                final = self._outcome(self._retrying, self._backend.read_into, key, self._view(slot))
            failures = failures + 1 if isinstance(final, Exception) else 0
            now = time.perf_counter()
            yield self._result(key, final, now - before)
            before = time.perf_counter()  # others may have come between

    def _read(self, key: bytes, view: memoryview, _length: int) -> Result:
        started = time.perf_counter()
        outcome = self._outcome(self._attempt, self._backend.read_into, key, view)
        return self._result(key, outcome, time.perf_counter() - started)

    def _outcome(self, call: Callable[..., _T], *args: Any) -> _T | Exception:
        try:
            return call(*args)
        except Exception as error:
            return _without_frames(error)

    def _result(self, key: bytes, outcome: int | Exception | None, seconds: float) -> Result:
        """Of a read that has returned or raised `outcome`."""
        if isinstance(outcome, CorruptChunkError):
            return Result(Status.CORRUPT, self._quarantine(key), seconds, str(outcome)[:_LONGEST_ERROR])
        if isinstance(outcome, Exception):
            return _failed(outcome, seconds)
        return Result(Status.MISSING, 0, seconds) if outcome is None else Result(Status.OK, outcome, seconds)

    def _write(self, key: bytes, view: memoryview, length: int) -> Result:
        started = time.perf_counter()
        outcome = self._outcome(self._attempt, self._backend.write, key, view[:length])
        seconds = time.perf_counter() - started
        if isinstance(outcome, Exception):
            return _failed(outcome, seconds)
        return Result(Status.OK, int(outcome), seconds)

    def _quarantine(self, key: bytes) -> int:
        try:
            return int(self._backend.quarantine(key))
        except Exception:  # it stays where it is, and stays refused
            return 0

    def _attempt(self, verb: Callable[..., _T], *args: Any) -> _T:
        """Call `verb`; the machinery of retries is entered only when there is something to retry."""
        try:
            return verb(*args)
        except Exception as error:
            if not self._may_repeat(error):
                raise
        return self._retrying(verb, *args)

    def _may_repeat(self, error: Exception) -> bool:
        return self._retries > 0 and retryable(error)

    def _counters(self) -> dict[str, float]:
        counters = self._backend.counters
        if not counters:
            return counters
        self._backend.counters = {}
        return counters


def _without_frames(error: Exception) -> Exception:
    """An error that can be kept: the frames that it came through hold the memory of the slot."""
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and link.__traceback__ is not None:  # else it has been seen: chains may be rings
            link.__traceback__ = None
            chain += (link.__cause__, link.__context__)
    return error


def _failed(error: Exception, seconds: float = 0.0) -> Result:
    return Result(Status.FAILED, 0, seconds, f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])
