"""A world without an engine around the manager: vLLM's own scheduler side of offloading, and little else.

What is real: ``OffloadingConnectorScheduler`` with its walks, jobs and resets; the manager; the store. What
is played here: the rest of vLLM's scheduler, a device whose blocks are a dict, and workers that copy between
that device and the arena whenever the test says so, in any order. Every chunk has one right content, so a
wrong slot shows when it is loaded.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from offloading_scheduler import TOKENS, make_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key
from vllm.v1.request import RequestStatus

from kvstore import Namespace, Store
from kvstore.arena import Arena
from kvstore.backends import create
from kvstore.config import StoreConfig
from kvstore.engine.worker import Worker
from kvstore.opening import BackendFactory, assemble
from kvstore_vllm.acks import AckWords
from kvstore_vllm.config import AdapterConfig, parse
from kvstore_vllm.manager import GroupInfo, KVStoreManager
from kvstore_vllm.telemetry import Telemetry
from support.chunks import CHUNK
from support.scripted import PAGE, Clock, ScriptedEngine

__all__ = ["TOKENS", "Prompt", "Rank", "World", "content", "group_keys", "open_scripted_world", "open_world"]


def content(chunk_hash: bytes, group: int, version: int) -> bytes:
    """The only right content of a chunk while the weights have this version."""
    return hashlib.shake_256(chunk_hash + bytes([group, version])).digest(CHUNK)


@dataclass(eq=False)
class Prompt:
    """A request as vLLM's scheduler side sees it: its tokens are a path of chunks.

    `state` is ``waiting``, ``loading``, ``running`` or ``finished``.
    """

    request_id: str
    path: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None = None
    extra: int = 1  # tokens behind the last whole chunk
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    state: str = "waiting"
    resumed: bool = False
    blocks: list[list[Any]] = field(default_factory=list)
    kv_hints: None = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0

    def __post_init__(self) -> None:
        self.block_hashes = [
            hashlib.sha256(bytes(self.path[: end + 1])).digest() for end in range(len(self.path))
        ]
        self.num_tokens = self.num_prompt_tokens = TOKENS * len(self.path) + self.extra

    def lose_blocks(self) -> None:
        """It is preempted, and has to begin anew."""
        self.status, self.state, self.resumed = RequestStatus.PREEMPTED, "waiting", True
        self.num_computed_tokens = 0

    def is_finished(self) -> bool:
        """Whether it has ended."""
        return bool(RequestStatus.is_finished(self.status))


@dataclass(eq=False)
class _Copy:
    """A job that a rank has in hand."""

    job_id: int
    job: TransferJob
    is_store: bool
    ticket: int


class Rank:
    """The only worker: copies between device and arena when it is told to, and acknowledges."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.todo: list[_Copy] = []
        self.fails: set[int] = set()  # tickets of stores that go wrong
        self._done: dict[str, set[int]] = {"store": set(), "load": set()}
        self._acknowledged = {"store": 0, "load": 0}

    def submit(self, jobs: dict[int, TransferJob], *, is_store: bool) -> None:
        """Take on jobs."""
        for job_id, job in jobs.items():
            spec = job.dst_spec if is_store else job.src_spec
            self.todo.append(_Copy(job_id, job, is_store, spec.ticket))

    def run(self, copy: _Copy) -> None:
        """Do one job, and tell the scheduler."""
        self.todo.remove(copy)
        slots, blocks = (
            (copy.job.dst_spec.slots, copy.job.src_spec.block_ids)
            if copy.is_store
            else (copy.job.src_spec.slots, copy.job.dst_spec.block_ids)
        )
        assert len(slots) == len(blocks)
        for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
            memory = self._world.store.arena.view(slot)
            if copy.is_store:
                failed = copy.ticket in self.fails
                memory[:CHUNK] = b"\xdd" * CHUNK if failed else self._world.device[block]
            else:
                self._world.device[block] = bytes(memory[:CHUNK])
        self._acknowledge(copy)
        self._world.completed(copy.job_id)

    def _acknowledge(self, copy: _Copy) -> None:
        direction = "store" if copy.is_store else "load"
        if copy.is_store and copy.ticket in self.fails:
            self._world.acks.fail(0, copy.ticket)
        self._done[direction].add(copy.ticket)
        while self._acknowledged[direction] + 1 in self._done[direction]:
            self._acknowledged[direction] += 1
        self._world.acks.acknowledge(0, direction, self._acknowledged[direction])  # type: ignore[arg-type]


class World:
    """Scheduler, device and workers around one manager.

    Parameters
    ----------
    store : Store
    config : AdapterConfig
    windows : sequence of int or None
        For each group the tokens of its sliding window; None for full attention.
    """

    def __init__(self, store: Store, config: AdapterConfig, windows: Sequence[int | None] = (None,)) -> None:
        self.store = store
        self.windows = windows
        self.acks = AckWords(store.arena.control, 1)
        self.telemetry = Telemetry(store.config, clock=store.clock)
        groups = [
            GroupInfo(index, TOKENS, None if window is None else -(-window // TOKENS))
            for index, window in enumerate(windows)
        ]
        self.manager = KVStoreManager(store, self.acks, config, groups, self.telemetry, kv_events=True)
        self.scheduler = make_scheduler(self.manager, windows)
        self.rank = Rank(self)
        self.device: dict[int, bytes] = {}
        self.version = 0
        self.requests: dict[str, Prompt] = {}
        self.cached: set[bytes] = set()  # chunk hashes in the device's prefix cache
        self._numbers = itertools.count(1)
        self._finished: list[str] = []
        self._flush: set[int] = set()

    # What a test does.

    def arrive(self, name: str, path: Iterable[int], **params: Any) -> Prompt:
        """A request comes in."""
        request = Prompt(name, tuple(path), params or None)
        self.requests[name] = request
        self.scheduler.on_new_request(request)
        return request

    def ask(self, request: Prompt) -> int | None:
        """What vLLM asks before it schedules a request: tokens that can be loaded, None for later."""
        local = 0
        while local < len(request.path) and request.block_hashes[local] in self.cached:
            local += 1
        request.num_computed_tokens = local * TOKENS
        found: int | None
        found, _ = self.scheduler.get_num_new_matched_tokens(request, request.num_computed_tokens)
        return found

    def step(self, room: int = 1 << 30) -> list[str]:
        """One step of the engine, in which at most `room` waiting requests find room on the device.

        Returns
        -------
        list of str
            The waiting requests that were told to wait.
        """
        for copy in [copy for copy in self.rank.todo if copy.job_id in self._flush]:
            self.rank.run(copy)
        deferred, started = [], []
        for request in [r for r in self.requests.values() if r.state == "waiting"]:
            found = self.ask(request)
            if found is None:
                deferred.append(request.request_id)
            elif room > 0:
                room -= 1
                self._allocate(request, found)
                if not found:
                    started.append(request)
        self._end_of_step(started)
        return deferred

    def finish(self, request: Prompt, *, aborted: bool = False) -> None:
        """A request ends."""
        request.status = RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_STOPPED
        request.state = "finished"
        self.scheduler.request_finished(request)
        self._finished.append(request.request_id)
        del self.requests[request.request_id]

    def preempt(self, request: Prompt) -> None:
        """A running request loses its place on the device."""
        request.lose_blocks()
        self._end_of_step([], preempted={request.request_id})

    def reset(self) -> None:
        """vLLM resets its caches: what runs begins anew, with other weights."""
        for request in self.requests.values():
            if request.state != "waiting":
                request.lose_blocks()
        self.cached.clear()
        self.scheduler.reset_cache()
        self.version += 1

    def completed(self, job_id: int) -> None:
        """A worker has done a job."""
        status = self.scheduler._jobs.get(job_id)
        request = None if status is None else self.requests.get(status.req_id)
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=OffloadingWorkerMetadata({job_id: 1}))
        )
        if status is not None and not status.is_store and request is not None:
            request.state = "loaded"
            self.check(request)

    def settle(self, *, newest_first: bool = False) -> None:
        """Workers do everything that they have in hand."""
        while self.rank.todo:
            self.rank.run(self.rank.todo[-1 if newest_first else 0])

    def check(self, request: Prompt) -> None:
        """Everything on the device that the request has is right."""
        for group, blocks in enumerate(request.blocks):
            for chunk, block in enumerate(blocks[: request.num_computed_tokens // TOKENS]):
                if not block.is_null:
                    expected = content(request.block_hashes[chunk], group, self.version)
                    assert self.device[block.block_id] == expected, f"chunk {chunk} of group {group} is wrong"

    # The rest of vLLM's scheduler.

    def _allocate(self, request: Prompt, found: int) -> None:
        """Blocks for all tokens of a request, and the order to load `found` of them."""
        local = request.num_computed_tokens
        total, chunks = local + found, len(request.path)
        request.blocks = []
        for group, window in enumerate(self.windows):
            blocks = []
            for chunk in range(chunks):
                skipped = window is not None and (chunk + 1) * TOKENS <= total - window + 1
                known = request.block_hashes[chunk] if chunk * TOKENS < local else None
                block = SimpleNamespace(
                    block_id=0 if skipped else next(self._numbers), is_null=skipped, block_hash=known
                )
                if known is not None and not skipped:
                    self.device[block.block_id] = content(known, group, self.version)
                blocks.append(block)
            request.blocks.append(blocks)
        loaded = KVCacheBlocks(tuple(request.blocks))
        self.scheduler.update_state_after_alloc(request, loaded, found)
        request.num_computed_tokens = total
        if found:
            request.state = "loading"

    def _end_of_step(self, started: Sequence[Prompt], preempted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        started = [*started, *(r for r in self.requests.values() if r.state == "loaded")]
        new: list[Prompt] = []
        resumed: list[Prompt] = []
        for request in started:
            request.state, request.status = "running", RequestStatus.RUNNING
            (resumed if request.resumed else new).append(request)
            self._compute(request)
        ids = {
            r.request_id: tuple([block.block_id for block in blocks] for blocks in r.blocks) for r in started
        }
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, block_ids=ids[r.request_id]) for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in resumed],
                new_block_ids=[ids[r.request_id] for r in resumed],
                resumed_req_ids={r.request_id for r in resumed},
            ),
            num_scheduled_tokens={r.request_id: r.num_tokens - r.num_computed_tokens for r in started},
            finished_req_ids=set(self._finished),
            preempted_req_ids=preempted,
            kv_connector_block_state=None,
            kv_cache_block_copies=None,
        )
        meta = self.scheduler.build_connector_meta(output)
        self._finished.clear()
        self._flush = set(meta.jobs_to_flush or ())
        self.rank.submit(meta.load_jobs, is_store=False)
        self.rank.submit(meta.store_jobs, is_store=True)
        for request in started:
            request.num_computed_tokens = request.num_tokens

    def _compute(self, request: Prompt) -> None:
        for group, blocks in enumerate(request.blocks):
            for chunk in range(request.num_computed_tokens // TOKENS, len(request.path)):
                if not blocks[chunk].is_null:
                    self.device[blocks[chunk].block_id] = content(
                        request.block_hashes[chunk], group, self.version
                    )


def _parse(tiers: Sequence[Any], slots: int, options: dict[str, Any]) -> AdapterConfig:
    policy = options.pop("policy", "lru")
    host = f"ram://?capacity={slots * PAGE}&pin=off&policy={policy}"
    return parse({"tiers": [host, *tiers], "promote_budget": 0.75, "engine": "inline", **options})


def open_world(
    *tiers: Any,
    slots: int = 64,
    windows: Sequence[int | None] = (None,),
    factory: BackendFactory = create,
    **options: Any,
) -> World:
    """A world over `tiers`, URLs or mappings, with a real engine; `options` are those of
    ``kv_connector_extra_config``."""
    config = _parse(tiers, slots, options)
    return World(assemble(config.store_options(CHUNK, {"model": "tiny"}), factory), config, windows)


def open_scripted_world(
    *tiers: Any, slots: int = 64, windows: Sequence[int | None] = (None,), **options: Any
) -> tuple[World, ScriptedEngine, Clock]:
    """The same with a scripted engine, and its clock."""
    clock, engines = Clock(), []

    def engine_of(
        config: StoreConfig, namespace: Namespace, arena: Arena, factory: BackendFactory
    ) -> ScriptedEngine:
        workers = [Worker(factory(tier, namespace), arena.view) for tier in config.tiers]
        engines.append(ScriptedEngine(workers, arena.view, clock))
        return engines[0]

    config = _parse(tiers, slots, options)
    store = assemble(config.store_options(CHUNK, {"model": "tiny"}), engine_of=engine_of, clock=clock)
    return World(store, config, windows), engines[0], clock


def group_keys(request: Prompt, group: int = 0) -> list[OffloadKey]:
    """The keys of a request in one group."""
    return [make_offload_key(chunk_hash, group) for chunk_hash in request.block_hashes]
