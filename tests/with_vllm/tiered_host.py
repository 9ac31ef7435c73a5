"""vLLM's own tiering, without an engine: its manager, its host memory, and one tier of ours below."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore_vllm import KVStoreTier

__all__ = ["ROW", "Host", "content", "make_config", "make_key"]

#: Bytes of a row.
ROW = 16 * 1024
_NO_STEP = ScheduleEndContext((), ())


def make_key(number: int) -> OffloadKey:
    """A key as vLLM makes it, the same for the same number."""
    return make_offload_key(hashlib.sha256(number.to_bytes(8)).digest(), 0)


def content(key: bytes) -> bytes:
    """The only right content of a row."""
    return hashlib.shake_256(key).digest(ROW)


def make_config(extra: dict[str, Any], *, events: bool = False, **changes: Any) -> OffloadingConfig:
    """What vLLM tells a spec, with `changes` to any of its fields."""
    fields: dict[str, Any] = {
        "name": "some/model",
        "dtype": "bfloat16",
        "tp_size": 1,
        "canonical_layout": False,
        "is_parallelism_agnostic": True,
        "layer_names": ("layers.0", "layers.1"),
        **changes,
    }
    tp_size = fields["tp_size"]
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, fields["layer_names"], 0),),
        worker_kv_bytes_per_block=ROW // tp_size,
        enable_kv_cache_events=events,
        extra_config=extra,
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(fields["name"], fields["dtype"]),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(
            0, tp_size, tp_size, 1, 1, 1, 0, 1, None, fields["is_parallelism_agnostic"]
        ),
        canonical_layout=fields["canonical_layout"],
        kv_cache_layout="NHD",
    )


class Host:
    """The manager of one engine, driven as vLLM's scheduler drives it; a context manager.

    Parameters
    ----------
    tier : mapping
        The entry of the tier, without its type.
    rows : int
        Of the host.
    events : bool
        Whether vLLM publishes KV events.

    Attributes
    ----------
    slowest : float
        Longest that the manager has kept its caller, in seconds.
    """

    def __init__(self, tier: dict[str, Any], *, rows: int = 8, events: bool = False, **changes: Any) -> None:
        entry = {"type": "KVStoreTier", "module_path": "kvstore_vllm", **tier}
        extra = {"cpu_bytes_to_use": rows * ROW, "secondary_tiers": [entry]}
        self.spec = TieringOffloadingSpec(make_config(extra, events=events, **changes))
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KVStoreTier)
        self.slowest = 0.0
        self._requests = 0

    def request(self) -> ReqContext:
        """A new request."""
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self.manager.on_new_request(context)
        return context

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Fill rows as a worker would, and begin to pass them on."""
        context = self.request()
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.row(row)[:] = content(key)
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)

    def row(self, number: int) -> memoryview:
        """Memory of one row."""
        payload = self.manager.primary_tier.get_kv_memoryview().cast("B")
        return payload[number * ROW : (number + 1) * ROW]

    def step(self) -> None:
        """The end of an engine's step; the next begins when a worker has answered, or soon."""
        with self._timed():
            self.manager.on_schedule_end(_NO_STEP)
        self.tier._mover._engine.wait(0.05)

    def settle(self) -> None:
        """Steps until nothing is under way."""
        self.until(lambda: not self.manager.has_pending_work())

    def until(self, ready: Callable[[], bool], steps: int = 400) -> None:
        """Steps until it is `ready`."""
        for _ in range(steps):
            if ready():
                return
            self.step()
        raise AssertionError("it did not come to that")

    def look_up(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> list[LookupResult]:
        """Final answers for `keys`: each is asked in every step until it is a hit or a miss."""
        context = context or self.request()
        answers = dict.fromkeys(keys, LookupResult.RETRY)

        def ask() -> bool:
            for key, answer in answers.items():
                if answer in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                    with self._timed():
                        answers[key] = self.manager.lookup(key, context)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers.values())

        self.until(ask)
        return list(answers.values())

    def forget(self, number: int = 10_000) -> None:
        """Let other chunks push everything out of the host, and none of them go on to the tier."""
        primary = self.manager.primary_tier
        keys = [make_key(number + place) for place in range(primary._num_chunks)]
        context = ReqContext("flood")
        primary.on_new_request(context)
        assert primary.prepare_store(keys, context) is not None
        primary.complete_store(keys, context)

    def read(self, key: OffloadKey) -> bytes:
        """What the host has under `key`."""
        context = self.request()
        (row,) = self.manager.prepare_load([key], context).chunk_ids
        found = bytes(self.row(row))
        self.manager.complete_load([key], context)
        return found

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.slowest = max(self.slowest, time.perf_counter() - started)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()
