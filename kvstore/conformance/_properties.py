"""The properties of a storage, one function each, and what follows for a store.

A function returns a remark, raises :class:`_Violated` with what it saw when the property does not hold, and
:class:`_Unknown` when that cannot be told here. Any other exception means that the property does not hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import msgspec

from .. import frame
from ..backends import BackendContext, connect, create
from ..backends.files import FileBackend
from ..errors import CorruptChunkError, NamespaceMismatchError
from ._race import Race, race_processes, race_threads
from ._trial import Trial, make_slot

__all__ = ["PROPERTIES", "Finding", "Property", "examine_property"]

#: A deadline (seconds) that no network meets, and how long it may take to notice.
_SHORT, _NOTICED = 1e-6, 2.0
#: Difference of clocks (seconds) that does not matter.
_SKEW = 60.0


class Property(NamedTuple):
    """Something that a storage may guarantee.

    ``required`` is what stores rely on; ``gain`` and ``loss`` say what a store does where it holds, and where
    it does not.
    """

    name: str
    meaning: str
    required: bool
    check: Callable[[Trial], str]
    gain: str
    loss: str


class Finding(NamedTuple):
    """A property at one storage.

    ``holds`` is None when it cannot be told; ``detail`` says what was seen, ``consequence`` what a store will
    therefore do.
    """

    name: str
    meaning: str
    required: bool
    holds: bool | None
    detail: str
    consequence: str


class _Violated(Exception):
    pass


class _Unknown(Exception):
    """What was seen, and what follows if that is not what follows from a violation."""

    def __init__(self, detail: str, consequence: str = "") -> None:
        super().__init__(detail)
        self.consequence = consequence


def examine_property(wanted: Property, trial: Trial) -> Finding:
    """Find out whether a property holds."""
    holds: bool | None = False
    consequence = wanted.loss
    try:
        detail = wanted.check(trial)
        holds, consequence = True, wanted.gain
    except _Unknown as unknown:
        holds, detail, consequence = None, str(unknown), unknown.consequence or wanted.loss
    except _Violated as violated:
        detail = str(violated)
    except Exception as error:  # clients of storage raise classes of their own
        detail = f"{type(error).__name__}: {error}"
        if not wanted.required:
            consequence = "the operation fails in a store, too: an error in its statistics, and later a miss"
    return Finding(wanted.name, wanted.meaning, wanted.required, holds, detail, consequence)


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise _Violated(otherwise)


# Reading and writing.


def _round_trip(trial: Trial) -> str:
    writer, reader = trial.clients(2)
    sizes = sorted({min(size, trial.chunk_size) for size in (0, 1, 4095, 4096, 4097, trial.chunk_size)})
    for size in sizes:
        key, payload = trial.new_key(), trial.payload(size, size)
        _require(writer.write(key, payload), f"a new chunk of {size} bytes was said to be there already")
        _require(trial.read(reader, key) == payload, f"a chunk of {size} bytes came back different")
    return f"payloads of {', '.join(map(str, sizes))} bytes"


def _absent(trial: Trial) -> str:
    (client,), keys = trial.clients(1), trial.new_keys(2)
    _require(client.exists(keys) == [False, False], "a chunk that was never written is said to be there")
    _require(trial.read(client, keys[0]) is None, "a chunk that was never written can be read")
    client.delete(keys)
    return "a miss when probed, read and deleted"


def _visible(trial: Trial) -> str:
    writer, other = trial.clients(2)
    for key in trial.new_keys(trial.rounds):
        _require(other.exists([key]) == [False], "a chunk is said to be there before it was written")
        writer.write(key, trial.payload(1))
        _require(other.exists([key]) == [True], "another client does not see a chunk that was written")
        _require(trial.read(other, key) is not None, "another client cannot read a chunk that was written")
    return f"by another client, {trial.rounds} times"


def _listed(trial: Trial) -> str:
    (writer, other), key = trial.clients(2), trial.new_key()
    list(other.scan())  # what a client may remember
    writer.write(key, trial.payload(1))
    _require(key in [row.key for row in other.scan()], "a listing lacks a chunk that was written just before")
    writer.delete([key])
    _require(key not in [row.key for row in other.scan()], "a listing still has a chunk that was deleted")
    return "by another client"


def _deleted(trial: Trial) -> str:
    (client,) = trial.clients(1)
    for key in trial.new_keys(trial.rounds):
        client.write(key, trial.payload(1))
        client.delete([key])
        _require(client.exists([key]) == [False], "a chunk that was deleted is said to be there")
        _require(client.write(key, trial.payload(2)), "a chunk that was deleted cannot be written again")
        _require(trial.read(client, key) == trial.payload(2), "a chunk that was written again is the old one")
    return f"and can be written again, {trial.rounds} times"


def _deletion_visible(trial: Trial) -> str:
    writer, other = trial.clients(2)
    for key in trial.new_keys(trial.rounds):
        writer.write(key, trial.payload(1))
        trial.read(other, key)  # what a client may remember
        writer.delete([key])
        _require(other.exists([key]) == [False], "another client still sees a chunk that was deleted")
        _require(trial.read(other, key) is None, "another client still reads a chunk that was deleted")
    return f"by another client, {trial.rounds} times"


def _atomic(trial: Trial) -> str:
    writer, reader = trial.clients(2)
    keys, payload = trial.new_keys(trial.rounds), trial.payload(1, trial.chunk_size)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [writer.write(key, payload) for key in keys])
        for key in keys:
            found = None
            while found is None:
                has_ended = writing.done()  # asked first: what is written then can be read
                try:
                    found = trial.read(reader, key)
                except CorruptChunkError as error:
                    raise _Violated(f"a reader saw a part of an object: {error}") from None
                if found is None and has_ended:
                    writing.result()
                    raise _Violated("a chunk that was written cannot be read")
            _require(found == payload, "a reader saw other bytes")
    return f"a reader beside a writer, {trial.rounds} chunks"


def _ranged(trial: Trial) -> str:
    (client,), key = trial.clients(1), trial.new_key()
    content = trial.payload(3, 4 * frame.ALIGNMENT + 3 * trial.chunk_size)
    trial.plant(client, key, bytes(content))
    head, rest = make_slot(frame.HEADER_SIZE), make_slot(trial.chunk_size)
    size = client.get_object(key, head, rest)
    _require(size is not None and size > len(head) + len(rest), "an object that is too long looks shorter")
    _require(bytes(head) + bytes(rest) == content[: len(head) + len(rest)], "the start of an object is wrong")
    return f"the first {len(head) + len(rest)} bytes of an object of {len(content)}"


# Writers that meet.


def _second_writer(trial: Trial) -> str:
    (first, second), key = trial.clients(2), trial.new_key()
    _require(first.write(key, trial.payload(1)), "a new chunk was said to be there already")
    _require(not second.write(key, trial.payload(2)), "the second writer was told that it created the chunk")
    _require(trial.read(first, key) == trial.payload(1), "the second writer changed the chunk")
    if not second.capabilities.first_writer_wins:
        raise _Violated("there is a look before each write, and no condition on the write itself")
    return "the storage refuses to create what is there"


def _threads_win_once(trial: Trial) -> str:
    return _judge(race_threads(trial), *trial.clients(1))


def _processes_win_once(trial: Trial) -> str:
    (client,) = trial.clients(1)
    if not client.capabilities.shared:
        raise _Unknown("the storage is in the memory of one process", "no other process can use it")
    if trial.quick:
        raise _Unknown("left out, to be quick", "what holds for threads should hold here")
    return _judge(race_processes(trial), client)


def _judge(races: Sequence[Race], client: FileBackend) -> str:
    _require(all(race.winner is not None for race in races), "after a race, the bytes are those of no writer")
    inexact = sum(not race.is_exact for race in races)
    writers = len(races[0].created)
    _require(not inexact, f"{inexact} of {len(races)} races of {writers} writers had no winner, or several")
    if not client.capabilities.first_writer_wins:
        raise _Unknown(f"it did in {len(races)} races of {writers} writers, but nothing guarantees it")
    return f"{len(races)} races of {writers} writers, one winner each"


# What must not be served.


def _short(trial: Trial) -> str:
    key, payload = trial.new_key(), trial.payload(4)
    whole = trial.framed(key, payload)
    sizes = (1, frame.HEADER_SIZE - 1, frame.HEADER_SIZE, len(whole) - 1)
    _expect_refusals(trial, key, [bytes(whole[:size]) for size in sizes])
    return f"{', '.join(map(str, sizes))} of {len(whole)} bytes"


def _damaged(trial: Trial) -> str:
    key, payload = trial.new_key(), trial.payload(5)
    damaged = []
    for place in (0, 40, 64, frame.HEADER_SIZE, frame.HEADER_SIZE + len(payload) - 1):
        data = trial.framed(key, payload)
        data[place] ^= 1
        damaged.append(bytes(data))
    longer = bytes(trial.framed(key, payload)) + bytes(frame.ALIGNMENT + 1)
    foreign = bytes(trial.framed(trial.new_key(), payload))
    _expect_refusals(trial, key, [*damaged, longer, foreign])
    return "flipped bits, a longer object, the object of another key"


def _expect_refusals(trial: Trial, key: bytes, objects: Sequence[bytes]) -> None:
    client, reader = trial.clients(2)
    for data in objects:
        trial.plant(client, key, data)
        try:
            trial.read(reader, key)
        except CorruptChunkError:
            client.delete([key])
        else:
            raise _Violated("a bad object was served, or taken for absent")


def _quarantined(trial: Trial) -> str:
    (client,), key = trial.clients(1), trial.new_key()
    trial.plant(client, key, b"no object")
    _require(client.quarantine(key), "it cannot be moved")
    _require(client.exists([key]) == [False], "it is still there after it was moved")
    _require(client.write(key, trial.payload(1)), "its place cannot be taken")
    return "moved, and its place taken"


def _manifest(trial: Trial) -> str:
    own = trial.namespace
    context = BackendContext(own.fingerprint, b"of another namespace", own.chunk_size)
    with closing(connect(trial.tier, context, own.directory)) as impostor:
        try:
            impostor.open()
        except NamespaceMismatchError:
            return "refused at open"
    raise _Violated("a store of other bytes could open the namespace")


# Time.


def _deadline(trial: Trial) -> str:
    hasty = msgspec.structs.replace(trial.tier, timeout=_SHORT, retries=0)  # no pauses between tries
    started = time.monotonic()
    try:
        with closing(create(hasty, trial.namespace)) as client:
            client.open()
            client.exists(trial.new_keys(1))
    except Exception:
        answered = False
    else:
        answered = True
    seconds = time.monotonic() - started
    _require(seconds < _NOTICED, f"with a deadline of 1 µs, it took {seconds:.1f} s")
    if answered:
        raise _Unknown("its calls have no deadline of their own that could be seen")
    return f"with a deadline of 1 µs, given up after {1000 * seconds:.0f} ms"


def _times(trial: Trial) -> str:
    (client,), key = trial.clients(1), trial.new_key()
    client.write(key, trial.payload(1))
    now = time.time()
    mtime = next(row.mtime for row in client.scan() if row.key == key)
    _require(mtime, "listings have no times")
    _require(abs(now - mtime) < _SKEW, f"the clock of the storage is off by {mtime - now:+.0f} s")
    return f"the clocks differ by {abs(now - mtime):.0f} s"


PROPERTIES: tuple[Property, ...] = (
    Property(
        "round-trip", "what was written is read, byte by byte", True, _round_trip,
        "chunks can be kept here", "no store can use this storage",
    ),
    Property(
        "absent", "what was never written is a miss", True, _absent,
        "a probe tells what is there", "no store can use this storage",
    ),
    Property(
        "visible", "what was written is seen at once", True, _visible,
        "other stores find chunks as soon as they ask again", "other stores miss chunks that are there",
    ),
    Property(
        "deleted", "what was deleted is gone, and can be written again", True, _deleted,
        "room is made by deleting", "no store can make room in this storage",
    ),
    Property(
        "deletion-visible", "others see at once that something was deleted", False, _deletion_visible,
        "a deleted chunk is a miss everywhere",
        "other stores may still read a chunk that was deleted: the right bytes, but longer than you may want",
    ),
    Property(
        "listed", "listings show what was just written or deleted", False, _listed,
        "ls, stat, verify and copies see all chunks", "ls, stat, verify and copies lag behind",
    ),
    Property(
        "atomic-create", "a reader sees a whole object or none", False, _atomic,
        "a chunk that is found is whole, whatever happens to its writer",
        "a reader that comes too early refuses the chunk, and may move it aside: no wrong byte, but a miss",
    ),
    Property(
        "ranged-read", "the start of a longer object can be read", True, _ranged,
        "an object that is too long is refused at the cost of a chunk", "it could pass for a chunk",
    ),
    Property(
        "conditional-write", "the storage itself refuses to create what is there", False, _second_writer,
        "a chunk is written once, by whoever comes first",
        "a look goes ahead of each write: it costs a request",
    ),
    Property(
        "first-writer-wins", "of threads that write a chunk at once, one creates it", False,
        _threads_win_once,
        "two writers of one chunk: the first one's object stays, the second is told",
        "two writers of one chunk: the second overwrites it with equal bytes; harmless",
    ),
    Property(
        "first-process-wins", "of processes that write a chunk at once, one creates it", False,
        _processes_win_once,
        "stores on many machines write each chunk once",
        "stores that write one chunk at once may do so twice, with equal bytes; harmless",
    ),
    Property(
        "short-object", "an object that lacks bytes is refused", True, _short,
        "a torn object is a miss", "wrong bytes could be served: do not use this storage",
    ),
    Property(
        "damaged-object", "an object with wrong bytes is refused", True, _damaged,
        "a damaged object is a miss", "wrong bytes could be served: do not use this storage",
    ),
    Property(
        "quarantine", "a bad object can be moved aside", False, _quarantined,
        "a bad object is moved to quarantine/, and its chunk can be stored anew",
        "a bad object stays, and its chunk stays a miss, until somebody deletes it",
    ),
    Property(
        "manifest", "a store of other bytes cannot open the namespace", True, _manifest,
        "a wrong manifest is an error at open", "stores of different bytes could mix",
    ),
    Property(
        "time-outs", "a call that takes too long is given up", False, _deadline,
        "the client gives up by the tier's timeout",
        "the engine gives up by the tier's timeout; the call keeps its worker until that is replaced",
    ),
    Property(
        "times", "the times of objects fit the clock of this machine", False, _times,
        "ages are right: for the hottest chunks of a copy, and for left-overs",
        "ages are wrong: for the hottest chunks of a copy, and for left-overs",
    ),
)  # fmt: skip
"""What is examined, in this order."""
