"""Workloads with bytes that check themselves: what ``demo`` and ``replay`` drive a store with.

The payload of a chunk follows from its key, so that everything a store serves can be compared with what it
must be. :func:`conversations` makes the requests of many users from a seed; :func:`replay` serves requests,
made up or from a trace, in the way an inference engine would.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from .planner import Lookup
from .traces import Key, Request

if TYPE_CHECKING:
    from .store import Store

__all__ = ["Outcome", "Payloads", "chunk_key", "conversations", "replay"]

_PAGE_WORDS = 512
_GOLDEN = 0x9E3779B97F4A7C15  # odd, so that the products with different page numbers differ
#: Payload bytes that are made, or leased, at a time: bounds the memory of a replay beside the store's own.
_BATCH_BYTES = 16 << 20
#: Longest wait for one promotion, or for room for one batch (seconds).
_PATIENCE = 120.0


class Payloads:
    """Payloads by key.

    A payload is one fixed page of random words, repeated, each time XORed with a number that follows from the
    key and the number of the page. A chunk under a wrong key, and a page at a wrong place, differ in every
    word.

    Parameters
    ----------
    chunk_size : int
        Bytes of every payload.
    rows : int
        Payloads that :meth:`make` can make at once.
    """

    def __init__(self, chunk_size: int, rows: int = 1) -> None:
        pages = -(-chunk_size // (8 * _PAGE_WORDS))
        self._page = np.random.default_rng(1).integers(1 << 63, size=_PAGE_WORDS, dtype=np.uint64)
        self._steps = np.arange(pages, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._made = np.empty((rows, pages, _PAGE_WORDS), np.uint64)
        # Compared by words where the size allows it, which is several times faster than by bytes.
        self._unit: np.dtype[Any] = np.dtype(np.uint64 if chunk_size % 8 == 0 else np.uint8)
        self._length = chunk_size // self._unit.itemsize

    def make(self, keys: Sequence[bytes]) -> dict[bytes, memoryview]:
        """Payloads of at most `rows` keys; valid until the next call of any method."""
        return {key: self._row(row, key).data.cast("B") for row, key in enumerate(keys)}

    def matches(self, key: bytes, data: memoryview) -> bool:
        """Whether `data` is the payload of `key`, and nothing but that."""
        if data.nbytes != self._length * self._unit.itemsize:
            return False
        return np.array_equal(np.frombuffer(data, self._unit), self._row(0, key))

    def _row(self, row: int, key: bytes) -> npt.NDArray[Any]:
        seeds = self._steps + np.uint64(xxh3_64_intdigest(key))
        np.bitwise_xor(self._page, seeds[:, None], out=self._made[row])
        words: npt.NDArray[Any] = self._made[row].reshape(-1).view(self._unit)
        return words[: self._length]


@dataclass
class Outcome:
    """What became of the requests so far.

    Attributes
    ----------
    requests, chunks : int
        Requests, and references to chunks in them.
    unique_chunks : int
        Different chunks among the references.
    verified_chunks, mismatches : int
        References that the store served with the right bytes, and with wrong ones.
    seconds : float
    """

    requests: int = 0
    chunks: int = 0
    unique_chunks: int = 0
    verified_chunks: int = 0
    mismatches: int = 0
    seconds: float = 0.0

    @property
    def hits(self) -> int:
        """References that the store served."""
        return self.verified_chunks + self.mismatches

    @property
    def hit_ratio(self) -> float:
        """Hits per reference, from 0 to 1; 0 without references."""
        return self.hits / self.chunks if self.chunks else 0.0


def chunk_key(name: Key) -> bytes:
    """Key in the store of the chunk that a trace calls `name`, 16 bytes."""
    return xxh3_128_digest(str(name).encode())


def conversations(
    *, seed: int = 0, users: int = 400, requests: int = 900, prompts: int = 12
) -> Iterator[Request]:
    """Multi-turn conversations of many users; the same for the same arguments.

    Each user has one of a few shared system prompts, and some users talk far more than others (Zipf). A
    request brings the whole conversation so far: the system prompt, all turns before, and a new one.

    Parameters
    ----------
    seed : int
    users, requests, prompts : int
        How many there are.

    Yields
    ------
    Request
        Chunks named ``<prompt>/<n>`` and ``<user>/<conversation>/<n>``.
    """
    draw = random.Random(seed)
    prefixes = [[f"p{p}/{n}" for n in range(draw.randint(8, 24))] for p in range(prompts)]
    talkative = list(accumulate(1 / rank**0.8 for rank in range(1, users + 1)))
    likes = draw.choices(range(prompts), [1 / rank for rank in range(1, prompts + 1)], k=users)
    turns: dict[int, int] = {}  # chunks of the user's conversation
    count = [0] * users
    for number in range(requests):
        (user,) = draw.choices(range(users), cum_weights=talkative)
        length = turns.get(user, 0) + draw.randint(2, 9)
        own = [f"u{user}/{count[user]}/{n}" for n in range(length)]
        yield Request(100.0 * number, prefixes[likes[user]] + own, session=f"u{user}/{count[user]}")
        turns[user] = length
        if draw.random() < 0.15:  # the user starts anew
            count[user] += 1
            del turns[user]


def replay(
    store: Store,
    requests: Iterable[Request],
    *,
    real_time: bool = False,
    on_request: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Serve requests from a store, check every byte that it serves, and store what it had not.

    Chunks are looked up, promoted, and read in place; those that are missing are put, without loss. Every
    reference counts, also those behind the first miss of a request.

    Parameters
    ----------
    store : Store
    requests : iterable of Request
    real_time : bool
        Keep to the timestamps, counted from that of the first request; a request that is late is served at
        once.
    on_request : callable, optional
        Gets the outcome so far after each request.

    Returns
    -------
    Outcome
    """
    driver = _Driver(store)
    outcome = driver.outcome
    started = time.monotonic()
    first: float | None = None
    for request in requests:
        if first is None:
            first = request.timestamp_ms
        if real_time:
            due = started + (request.timestamp_ms - first) / 1000
            time.sleep(max(0.0, due - time.monotonic()))
        driver.serve(request.keys)
        outcome.seconds = time.monotonic() - started
        if on_request is not None:
            on_request(outcome)
    return outcome


class _Driver:
    """Serves requests in batches that fit half of the host tier, so that none evicts its own head."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._most = max(1, min(store.arena.slots // 2, _BATCH_BYTES // store.chunk_size))
        self._payloads = Payloads(store.chunk_size, self._most)
        self._seen: set[Key] = set()
        self.outcome = Outcome()

    def serve(self, names: Sequence[Key]) -> None:
        """One request: the chunks called `names`, in order."""
        self._seen.update(names)
        self.outcome.requests += 1
        self.outcome.unique_chunks = len(self._seen)
        for batch in _batches(map(chunk_key, names), self._most):
            self.outcome.chunks += len(batch)
            served = self._read(batch)
            self._put([key for key in batch if key not in served])

    def _read(self, keys: list[bytes]) -> set[bytes]:
        """Verify what the store has, promoted if need be; returns the keys of that."""
        answers = self._store.lookup(keys)
        hot = [key for key, answer in zip(keys, answers, strict=True) if answer is Lookup.HIT]
        served = self._verify(hot)  # first, because a promotion may evict them
        cold = [key for key in keys if key not in served]
        if cold:
            found = self._store.prefetch(cold).result(timeout=_PATIENCE)
            served |= self._verify([*found.promoted, *found.skipped])
        return served

    def _verify(self, keys: list[bytes]) -> set[bytes]:
        """Read in place and compare; returns those that are in host memory."""
        if not keys:
            return set()
        with self._store.read(keys) as lease:
            for key, view in lease.items():
                if self._payloads.matches(key, view):
                    self.outcome.verified_chunks += 1
                else:
                    self.outcome.mismatches += 1
            return set(lease)

    def _put(self, keys: list[bytes]) -> None:
        if keys:
            self._store.put_many(self._payloads.make(keys), timeout=_PATIENCE)


def _batches(keys: Iterable[bytes], most: int) -> Iterator[list[bytes]]:
    """`keys` in order, in batches of at most `most` without repetition: a repeated key has been stored by
    then."""
    batch: dict[bytes, None] = {}
    for key in keys:
        if len(batch) == most or key in batch:
            yield list(batch)
            batch = {}
        batch[key] = None
    if batch:
        yield list(batch)
