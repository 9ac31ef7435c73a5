"""Measures one tier for ``bench``: a store against a plain loop, repetition by repetition."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from statistics import median
from typing import Any, NamedTuple

import msgspec

from ..backends.layout import object_name
from ..config import StoreConfig
from ..errors import KVStoreError
from ..namespace import Namespace
from ..opening import open_store
from ..workload import Payloads, chunk_key
from ._plain import LocalLoop, drop_pages, make_loop, remove_namespace

__all__ = ["OPERATIONS", "Timing", "measure"]

#: Operation -> what is timed.
OPERATIONS: dict[str, str] = {
    "put": "put_many and flush: into host memory and on to the tier",
    "get host": "get_many of what is in host memory; the loop copies it",
    "get tier, hot": "prefetch from the tier, files in the page cache",
    "get tier, cold": "prefetch from the tier, files put out of the page cache",
}


class Timing(NamedTuple):
    """Median times in seconds of one operation on `chunks` chunks."""

    chunks: int
    store: float
    plain: float


def measure(
    config: StoreConfig, index: int, chunks: int, repeat: int, on_round: Callable[[int], None]
) -> tuple[dict[str, Timing], str]:
    """Measure one tier of `config`.

    Parameters
    ----------
    config : StoreConfig
    index : int
        Which of its tiers.
    chunks : int
        Chunks in a put, at least 2; each get from the tier is of half of them.
    repeat : int
        Repetitions that count; one to warm up comes before.
    on_round : callable
        Gets the number of repetitions that have ended.

    Returns
    -------
    timings : dict
        By operation; what cannot be had there is left out.
    what : str
        What the loop does.
    """
    with ExitStack() as stack:
        bench = _Bench(config, index, chunks, stack)
        for number in range(repeat + 1):
            bench.round(number)
            on_round(number)
    return {name: bench.timing(name) for name in bench.pairs}, bench.loop.what


class _Bench:
    """Two stores over one tier, and the loop beside it.

    One store writes. The other does not have the chunks in its host memory, and reads: one half of them while
    the files are in the page cache, the other half after they have left it.
    """

    def __init__(self, config: StoreConfig, index: int, chunks: int, stack: ExitStack) -> None:
        token = secrets.token_hex(4)
        self.tier = config.tiers[index]
        self.halves = slice(0, chunks // 2), slice(chunks // 2, chunks)
        self.counts = dict(zip(OPERATIONS, (chunks, chunks, chunks // 2, chunks - chunks // 2), strict=True))
        self.pairs: dict[str, list[tuple[float, float]]] = {}
        self._payloads = Payloads(config.chunk_size, chunks)
        # Later rounds put other bytes under these views, which is all the same to the loop.
        sources = list(self._payloads.make(self._keys(0)).values())
        self.loop = stack.enter_context(closing(make_loop(self.tier, sources, f"bench-{token}")))
        own = msgspec.structs.replace(
            config, tiers=(self.tier,), namespace={"workload": "bench", "run": token}
        )
        self._directory = Namespace(own.namespace, own.chunk_size).directory
        stack.callback(self._remove)
        self._writer = stack.enter_context(open_store(config=own))
        self._reader = stack.enter_context(open_store(config=own))

    def round(self, number: int) -> None:
        """Every operation once, on new chunks, by the store and by the loop; they take turns to be first."""
        keys = self._keys(number)
        items = self._payloads.make(keys)
        hot, cold = self.halves

        def put() -> None:
            self._writer.put_many(items)
            self._writer.flush()

        self._compare("put", number, put, self.loop.put)
        self._compare("get host", number, lambda: self._writer.get_many(keys), self.loop.copy)
        self._compare("get tier, hot", number, lambda: self._promote(keys[hot]), lambda: self.loop.get(hot))
        if self._drop_pages(keys):
            self._compare(
                "get tier, cold", number, lambda: self._promote(keys[cold]), lambda: self.loop.get(cold)
            )
        self._writer.delete(keys)
        self._reader.delete(keys)
        self.loop.clear()

    def timing(self, name: str) -> Timing:
        """Medians of the rounds that count."""
        store, plain = (median(seconds) for seconds in zip(*self.pairs[name], strict=True))
        return Timing(self.counts[name], store, plain)

    def _keys(self, number: int) -> list[bytes]:
        return [chunk_key(f"bench/{number}/{n}") for n in range(self.counts["put"])]

    def _compare(self, name: str, number: int, store: Callable[[], Any], plain: Callable[[], Any]) -> None:
        if number % 2:
            plain_seconds = _timed(plain)
            pair = (_timed(store), plain_seconds)
        else:
            pair = (_timed(store), _timed(plain))
        if number:  # the first round warms up
            self.pairs.setdefault(name, []).append(pair)

    def _promote(self, keys: list[bytes]) -> None:
        promoted = self._reader.prefetch(keys).result().promoted
        if len(promoted) != len(keys):
            raise KVStoreError(
                f"tier {self.tier.name!r}: {len(promoted)} of {len(keys)} chunks came back to a second "
                "store; bench needs a tier that is written and read, and that two stores can share"
            )

    def _drop_pages(self, keys: list[bytes]) -> bool:
        if not isinstance(self.loop, LocalLoop):
            return False
        folder = f"{self.tier.path}/{self._directory}"
        return drop_pages(f"{folder}/{object_name(key)}" for key in keys) and drop_pages(self.loop.paths)

    def _remove(self) -> None:
        with suppress(OSError):  # what cannot be reached has been reported, or holds nothing
            remove_namespace(self.tier, self._directory)


def _timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
