"""The worker: parts of large batches, keys that fail alone, batches that the backend reads as such, and what
goes between two transfers."""

from __future__ import annotations

import errno
import gc
import mmap
from collections.abc import Collection, Iterator, Sequence
from time import sleep

import pytest

from kvstore.backends import Backend, BackendContext, Capabilities, StoredObject
from kvstore.engine.base import Batch, Completion, Status, Verb, may_join
from kvstore.engine.worker import _LOOK_EVERY, Worker
from kvstore.errors import BackendError, CorruptChunkError
from support.chunks import CHUNK

KEYS = [number.to_bytes(16) for number in range(256)]


class Listing(Backend):
    """Knows which keys it has, and which it chokes on."""

    def __init__(self, bad: Sequence[bytes]) -> None:
        super().__init__(BackendContext(fingerprint=bytes(16), manifest=b"", chunk_size=CHUNK))
        self.bad = set(bad)
        self.gone: set[bytes] = set()
        self.asked = 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._choke(keys)
        return [key not in self.gone for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._choke([key])
            self.gone.add(key)

    def _choke(self, keys: Sequence[bytes]) -> None:
        self.asked += 1
        if self.bad.intersection(keys):
            raise NotADirectoryError("a file where a directory should be")

    def scan(self) -> Iterator[StoredObject]:
        yield from ()

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        return None

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        return False


def run(backend: Backend, verb: Verb) -> list[Completion]:
    worker = Worker(backend, lambda _slot: memoryview(bytearray(CHUNK)), retries=1)
    worker.open()
    done: list[Completion] = []
    worker.run(Batch(1, 0, verb, KEYS, [-1] * len(KEYS), [0] * len(KEYS)), done.append)
    worker.close()
    assert [c.first for c in done] == [sum(len(d.results) for d in done[:n]) for n in range(len(done))]
    assert sum(len(completion.results) for completion in done) == len(KEYS), "one result for each"
    return done


def statuses(done: list[Completion]) -> list[Status]:
    return [result.status for completion in done for result in completion.results]


@pytest.mark.parametrize("verb", [Verb.PROBE, Verb.DELETE])
def test_a_key_that_fails_alone_fails_alone(verb: Verb) -> None:
    found = statuses(run(Listing([KEYS[7], KEYS[200]]), verb))
    assert [n for n, status in enumerate(found) if status is Status.FAILED] == [7, 200]
    assert set(found) == {Status.OK, Status.FAILED}


def test_storage_that_is_down_is_not_asked_for_every_key() -> None:
    backend = Listing(KEYS)
    assert set(statuses(run(backend, Verb.PROBE))) == {Status.FAILED}
    assert backend.asked < len(KEYS) / 4


def test_the_head_of_a_batch_is_answered_before_its_tail() -> None:
    assert len(run(Listing([]), Verb.PROBE)) > 1


class Failing(Listing):
    """Cannot read or write, and holds the memory for it in one frame more."""

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        try:
            raise OSError(errno.EIO, "the disk is gone")
        except OSError as error:
            raise BackendError("no", retryable=True) from error

    def write(self, key: bytes, view: memoryview) -> bool:
        return bool(self.read_into(key, view))


@pytest.mark.parametrize("verb", [Verb.READ, Verb.WRITE])
@pytest.mark.parametrize("retries", [0, 1])
def test_what_has_failed_holds_no_memory(verb: Verb, retries: int) -> None:
    memory = mmap.mmap(-1, CHUNK)
    worker = Worker(Failing([]), lambda _slot: memoryview(memory), retries=retries)
    done: list[Completion] = []
    gc.disable()  # nothing is left for it
    try:
        worker.run(batch_of(1, verb, *KEYS[:3]), done.append)
        memory.close()  # raises while anybody has a view of it
    finally:
        gc.enable()
    assert statuses(done) == [Status.FAILED] * 3


class Ring(Listing):
    """Raises an error because of one that has come because of the first."""

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        first, second = BackendError("first"), BackendError("second")
        try:
            raise first
        except BackendError:
            try:
                raise second from first
            except BackendError:
                raise first from second


def test_errors_that_are_because_of_each_other_are_errors() -> None:
    done: list[Completion] = []
    worker = Worker(Ring([]), lambda _slot: memoryview(bytearray(CHUNK)))
    worker.run(batch_of(1, Verb.READ, *KEYS[:3]), done.append)
    assert statuses(done) == [Status.FAILED] * 3


# Batches that the backend reads as such.

PASSING = BackendError("the connection broke", retryable=True)


class Batches(Listing):
    """Reads whole batches, each key with its own outcome; what is asked for once more has another one."""

    capabilities = Capabilities(bulk_read=True, quarantine=True)

    def __init__(self, outcomes: dict[bytes, int | Exception | None], then: int | Exception) -> None:
        super().__init__([])
        self.outcomes = outcomes
        self.then = then
        self.again: list[bytes] = []

    def read_many(
        self, keys: Sequence[bytes], outs: Sequence[memoryview]
    ) -> Iterator[int | Exception | None]:
        assert list(keys) == KEYS
        assert len(outs) == len(KEYS)
        for number, key in enumerate(keys):
            yield self.outcomes.get(key, number)

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        self.again.append(key)
        if isinstance(self.then, Exception):
            raise self.then
        return self.then

    def quarantine(self, key: bytes) -> bool:
        return key == KEYS[3]


def test_a_batch_is_left_to_the_backend() -> None:
    backend = Batches({KEYS[3]: CorruptChunkError("torn"), KEYS[5]: None, KEYS[7]: OSError("broken")}, 0)
    results = [result for completion in run(backend, Verb.READ) for result in completion.results]
    failed = {3: Status.CORRUPT, 5: Status.MISSING, 7: Status.FAILED}
    assert [result.status for result in results] == [failed.get(n, Status.OK) for n in range(len(KEYS))]
    assert [result.value for n, result in enumerate(results) if n not in failed] == [
        n for n in range(len(KEYS)) if n not in failed
    ]
    assert results[3].value == 1, "it was moved aside"
    assert backend.again == []


def test_what_fails_in_a_batch_is_repeated_alone() -> None:
    backend = Batches({KEYS[3]: PASSING, KEYS[200]: PASSING}, 77)
    results = [result for completion in run(backend, Verb.READ) for result in completion.results]
    assert {result.status for result in results} == {Status.OK}
    assert [results[3].value, results[200].value] == [77, 77]
    assert backend.again == [KEYS[3], KEYS[200]]


def test_a_batch_that_fails_as_a_whole_is_not_repeated_key_by_key() -> None:
    backend = Batches(dict.fromkeys(KEYS, PASSING), PASSING)
    assert set(statuses(run(backend, Verb.READ))) == {Status.FAILED}
    assert len(backend.again) < 5


# Between two transfers.


class Slowly(Listing):
    """Reads that take longer than a worker's pause between two looks; it notes what it is told to do."""

    def __init__(self) -> None:
        super().__init__([])
        self.deeds: list[tuple[str, bytes]] = []

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.deeds.append(("exists", keys[0]))
        return [True] * len(keys)

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        self.deeds.append(("read", key))
        sleep(2 * _LOOK_EVERY)
        return 1


class SlowlyTogether(Slowly):
    """The same for whole batches, which it begins when it is told of them."""

    capabilities = Capabilities(bulk_read=True, overlaps=True)

    def read_many(
        self, keys: Sequence[bytes], outs: Sequence[memoryview]
    ) -> Iterator[int | Exception | None]:
        self.deeds.append(("begin", keys[0]))
        return super().read_many(keys, outs)


def batch_of(number: int, verb: Verb, *keys: bytes) -> Batch:
    return Batch(number, 0, verb, list(keys), [0] * len(keys), [0] * len(keys))


def run_joined(backend: Backend, first: Batch, *waiting: Batch) -> list[Completion]:
    """Run `first` while others wait."""
    queue = list(waiting)
    done: list[Completion] = []

    def joining(running: Batch, verbs: Collection[Verb]) -> Batch | None:
        return queue.pop(0) if queue and may_join(queue[0], running, verbs) else None

    worker = Worker(
        backend, lambda _slot: memoryview(bytearray(CHUNK)), has_quick_probes=True, begins_ahead=True
    )
    worker.run(first, done.append, joining)
    assert not [batch for batch in queue if may_join(batch, first, [Verb.PROBE])]
    worker.close()
    return done


def test_a_probe_does_not_wait_for_reads() -> None:
    backend = Slowly()
    done = run_joined(backend, batch_of(1, Verb.READ, *KEYS[:4]), batch_of(2, Verb.PROBE, KEYS[9]))
    assert backend.deeds == [("read", KEYS[0]), ("exists", KEYS[9]), *(("read", key) for key in KEYS[1:4])]
    assert [(completion.id, len(completion.results)) for completion in done][:2] == [(1, 1), (2, 1)]
    assert sum(len(completion.results) for completion in done if completion.id == 1) == 4


def test_other_batches_wait_where_the_backend_reads_chunk_by_chunk() -> None:
    backend = Slowly()
    run_joined(backend, batch_of(1, Verb.READ, *KEYS[:4]), batch_of(2, Verb.READ, KEYS[9]))
    assert backend.deeds == [("read", key) for key in KEYS[:4]]


def test_a_probe_of_another_peer_waits() -> None:
    backend = Slowly()
    probe = batch_of(2, Verb.PROBE, KEYS[9])._replace(address="elsewhere:1")
    run_joined(backend, batch_of(1, Verb.READ, *KEYS[:4]), probe)
    assert backend.deeds == [("read", key) for key in KEYS[:4]]


def test_the_next_batch_is_begun_before_the_last_has_ended_where_the_backend_reads_batches() -> None:
    backend = SlowlyTogether()
    later = [
        batch_of(2, Verb.READ, *KEYS[4:6]),
        batch_of(3, Verb.PROBE, KEYS[9]),
        batch_of(4, Verb.READ, KEYS[7]),
    ]
    done = run_joined(backend, batch_of(1, Verb.READ, *KEYS[:2]), *later)
    assert backend.deeds == [
        ("begin", KEYS[0]),
        ("read", KEYS[0]),
        ("begin", KEYS[4]),
        ("read", KEYS[1]),
        ("exists", KEYS[9]),
        ("read", KEYS[4]),
        ("begin", KEYS[7]),
        ("read", KEYS[5]),
        ("read", KEYS[7]),
    ]
    answered = {number: sum(len(c.results) for c in done if c.id == number) for number in (1, 2, 3, 4)}
    assert answered == {1: 2, 2: 2, 3: 1, 4: 1}


class Breaking(SlowlyTogether):
    """Whatever is begun as number `bad`, from 0, fails, at once or chunk by chunk."""

    def __init__(self, bad: int, error: Exception, *, at_once: bool = False) -> None:
        super().__init__()
        self.bad, self.error, self.at_once = bad, error, at_once

    def read_many(
        self, keys: Sequence[bytes], outs: Sequence[memoryview]
    ) -> Iterator[int | Exception | None]:
        number = sum(deed == "begin" for deed, _ in self.deeds)
        outcomes = super().read_many(keys, outs)
        if number != self.bad:
            return outcomes
        if self.at_once:
            raise self.error
        return iter([self.error] * len(keys))


def test_a_batch_that_cannot_be_begun_fails_alone() -> None:
    backend = Breaking(1, OSError("broken"), at_once=True)
    done = run_joined(backend, batch_of(1, Verb.READ, *KEYS[:3]), batch_of(2, Verb.READ, *KEYS[4:6]))
    found = {number: statuses([c for c in done if c.id == number]) for number in (1, 2)}
    assert found == {1: [Status.OK] * 3, 2: [Status.FAILED] * 2}


@pytest.mark.parametrize(("error", "status"), [(PASSING, Status.OK), (OSError("broken"), Status.FAILED)])
def test_a_batch_begun_ahead_that_another_one_has_failed_is_begun_again(
    error: Exception, status: Status
) -> None:
    backend = Breaking(1, error)
    done = run_joined(backend, batch_of(1, Verb.READ, *KEYS[:3]), batch_of(2, Verb.READ, *KEYS[4:6]))
    assert statuses([completion for completion in done if completion.id == 2]) == [status] * 2
    assert sum(deed == "begin" for deed, _ in backend.deeds) == 2 + (status is Status.OK)


def test_only_what_may_be_begun_ahead_is() -> None:
    backend = SlowlyTogether()
    worker = Worker(backend, lambda _slot: memoryview(bytearray(CHUNK)))
    asked: list[Collection[Verb]] = []
    worker.run(batch_of(1, Verb.READ, *KEYS[:3]), lambda _: None, lambda _batch, verbs: asked.append(verbs))
    assert asked == [], "threads that hang would take the other batch with them"
