"""One of kvstore's tiers among the secondary tiers of vLLM's own ``TieringOffloadingSpec``.

``{"type": "KVStoreTier", "module_path": "kvstore_vllm", "url": "s3://bucket/kv"}``: bytes go between vLLM's
host memory and storage directly, by the workers of a kvstore engine. vLLM decides what is in the host, and
what is loaded and stored; this decides how, and what becomes of it (:mod:`kvstore_vllm.tiering`).

Who owns what: vLLM's scheduler calls everything here from one thread. No call waits for storage but
``drain_jobs`` (it must: vLLM reuses every row afterwards), ``shutdown`` and the constructor, for the tier's
timeout at most.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.backends import create
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.opening import make_engine, make_tier, settled, start_tiers
from kvstore.presence import Known

from .kv_events import to_offloading
from .telemetry import Pace, TierTelemetry, source_of, tier_definitions
from .tiering.jobs import Job
from .tiering.mover import Mover
from .tiering.options import TierOptions, visible_fields
from .tiering.region import Region
from .tiering.transfers import HOST

__all__ = ["KVStoreTier"]

_log = logging.getLogger(__name__)

#: Bytes that a key gets behind it by a reset of the cache.
_EPOCH_BYTES = 8
#: Seconds that workers get to end.
_LAST_MOMENTS = 5.0

_ANSWERS = {
    Known.PRESENT: LookupResult.HIT,
    Known.ABSENT: LookupResult.MISS,
    Known.PROBING: LookupResult.RETRY,
}


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM comes without types
    """A tier given by its URL; made by vLLM.

    Parameters
    ----------
    offloading_spec : OffloadingSpec
    primary_kv_view : memoryview
        Rows of vLLM's host memory, shape (rows, bytes).
    tier_type : str
    backpressure_detector : BackpressureDetector, optional
        Asked by vLLM before each store, and told by vLLM how long it took.
    **options
        ``url`` and the options of the tier, ``namespace``, ``engine``, ``on_reset``, ``nice``, ``affinity``,
        ``locality``, ``enable_kv_events``: see ``docs/how-to/vllm-tier.md``.

    Raises
    ------
    kvstore.ConfigError
        An option is not valid.
    kvstore.KVStoreError
        The tier cannot be opened and is required, or contradicts the namespace.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierOptions.parse(options)
        seen = visible_fields(offloading_spec.config, replicated=offloading_spec.replicated_layout)
        self._region = Region.of(primary_kv_view)
        try:
            config = settings.store_config(seen, self._region.slots, self._region.slot_size)
            self._mover = _open(config, self._region)
        except BaseException:
            self._region.close()
            raise
        (tier,) = config.tiers
        self.name = tier.name
        self.locality = _locality(settings, tier.scheme)
        self.cache_hit_source = source_of(tier.scheme)
        self._rekeys = settings.on_reset == "rekey"
        self._epoch = b""
        self._wants_events = _wants_events(settings, offloading_spec)
        self._pace = Pace()
        self._telemetry = TierTelemetry()
        if settings.namespace is None:
            _log.warning(
                "kvstore tier %r: what it stores is found by this run only, for vLLM does not tell a tier "
                'which weights it runs; name them to share it: "namespace": {"weights": "..."}',
                self.name,
            )

    # Look-ups.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are stored as they come; nothing is kept of a request."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """What is known of `key`; RETRY while the storage is being asked, which ends with the tier's
        timeout."""
        return _ANSWERS[self._mover.lookup(key + self._epoch)]

    # Jobs.

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write; what the tier cannot take now fails, and is a miss later."""
        self._mover.store(*self._arguments(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read into rows."""
        self._mover.load(*self._arguments(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended; vLLM may reuse their rows."""
        return [_result(job) for job in self._mover.poll()]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send off what this step has asked for, in as few batches as possible."""
        self._mover.advance()

    def drain_jobs(self) -> None:
        """Wait until no worker touches any row: the cache is being reset.

        The weights may be others afterwards, so that nothing stored before is found again, unless
        ``on_reset=keep`` says that they never change.
        """
        self._mover.drain()
        if self._rekeys:
            self._epoch = os.urandom(_EPOCH_BYTES)

    def shutdown(self) -> None:
        """End the workers; what has not been written by then is not kept."""
        self._mover.close(_LAST_MOMENTS)
        self._region.close()

    # What vLLM shows to others.

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What has become of the tier's chunks since the last call."""
        events = self._mover.events()  # taken in any case, so that they do not pile up
        if not self._wants_events:
            return ()
        localities = {self.name: self.locality.value}
        return to_offloading(events, host=HOST, epoch=self._epoch, localities=localities)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The metrics of a tier; which tier is a label."""
        return tier_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What has been counted since the last report; None when it is too early for another."""
        if not self._pace.is_due():
            return None
        stats = OffloadingConnectorStats()
        self._telemetry.report([self._mover.stats()], stats)
        return stats

    def _arguments(self, job: TransferJob) -> tuple[int, list[bytes], list[bytes], list[int]]:
        keys = list(job.keys)
        return job.job_id, keys, [key + self._epoch for key in keys], job.chunk_ids.tolist()


def _open(config: StoreConfig, region: Region) -> Mover:
    """Start the engine of a tier over vLLM's rows."""
    if config.engine == "processes" and region.fd < 0:
        raise ConfigError("the memory of vLLM's host tier is no shared file here; use engine=threads")
    config = settled(config)
    engine = make_engine(
        config, Namespace(config.namespace, config.chunk_size), region, create, attach=region.attacher
    )
    try:
        tier = make_tier(config, 0, region.slots)
        start_tiers(engine, [tier], time.monotonic)
        return Mover(tier, engine, config.chunk_size)
    except BaseException:
        engine.close(1.0)
        raise


def _locality(settings: TierOptions, scheme: str) -> Locality:
    """As configured; otherwise a directory is this machine's, and everything else is not."""
    return Locality(settings.tier.locality or ("LOCAL" if scheme in ("file", "memory") else "REMOTE"))


def _wants_events(settings: TierOptions, spec: OffloadingSpec) -> bool:
    if settings.tier.enable_kv_events and not spec.kv_events_config.enable_kv_cache_events:
        _log.warning("enable_kv_events has no effect on a tier while vLLM publishes no KV events")
        return False
    return settings.tier.enable_kv_events


def _result(job: Job) -> JobResult:
    return JobResult(
        job.id,
        job.complete,
        successful_keys=None if job.complete else job.good_keys or None,
        transfer_time=job.seconds,
        transfer_bytes=job.moved,
    )
