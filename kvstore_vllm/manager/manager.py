"""vLLM's offloading manager over a store.

Who owns what: vLLM's scheduler calls everything here from one thread, and nothing waits for storage. Between
two calls of the store nothing leaves host memory, so that a HIT holds until the scheduler acts on it.

Keys: vLLM's are ``block hash + group``; the store's are these with the epoch (:mod:`.resets`) at the end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore import Event, KVStoreError, Prefix, Store, WriteLease

from .._compat import key_positions
from ..acks import AckWords
from ..config import AdapterConfig
from ..kv_events import to_offloading
from ..specs import SlotSpec
from ..telemetry import Telemetry
from .admission import Threshold
from .heads import GroupInfo
from .lookups import Lookups
from .resets import new_epoch
from .retention import Retention
from .transfers import Transfers

__all__ = ["KVStoreManager"]

_log = logging.getLogger(__name__)

_HIT = LookupResult.HIT
#: Seconds that tiers get for what they are still owed when the engine ends.
_LAST_MOMENTS = 5.0


class KVStoreManager(OffloadingManager):  # type: ignore[misc]
    """Decides what is stored, what is loaded, and what is brought up for it.

    Parameters
    ----------
    store : Store
        Closed by :meth:`shutdown`.
    acks : AckWords
        What the workers have done.
    config : AdapterConfig
    groups : sequence of GroupInfo
    telemetry : Telemetry
    kv_events : bool
        Whether vLLM publishes KV events, and so takes them.

    Attributes
    ----------
    store : Store
    """

    def __init__(
        self,
        store: Store,
        acks: AckWords,
        config: AdapterConfig,
        groups: Sequence[GroupInfo],
        telemetry: Telemetry,
        *,
        kv_events: bool = False,
    ) -> None:
        super().__init__()
        self.store = store
        self._resident = store.resident
        self._config = config
        self._telemetry = telemetry
        self._several = len(groups) > 1
        self._transfers = transfers = Transfers(store, acks)
        self._lookups = Lookups(store, config, groups, telemetry, lambda: transfers.loading)
        self._waiting = self._lookups.waiting
        self._retention = Retention(store)
        self._threshold = Threshold(config.store_threshold, config.max_tracker_size)
        self._epoch = b""
        self._events: deque[Event] | None = deque() if kv_events else None
        self._troubled = False

    # Look-ups.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk can be loaded now, will be soon, or not at all."""
        if key + self._epoch in self._resident and not (
            self._waiting and req_context.req_id in self._waiting
        ):
            return _HIT
        try:
            return self._lookups.answer(key, req_context)
        except KVStoreError as error:
            self._complain(error)
            return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where a chunk came from that is about to be loaded."""
        return self._telemetry.hit_source(key + self._epoch, req_context.req_id)

    # Loads.

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotSpec:
        """Hold the slots of `keys`, all of which a lookup has called HIT in this step."""
        spec = self._transfers.load(req_context.req_id, keys, self._stored(keys))
        self._lookups.scheduled(req_context.req_id)
        self._take_events()
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """All workers have copied; the slots may go."""
        self._transfers.loaded(req_context.req_id, keys)

    # Stores.

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Slots for what of `keys` is new, as far as there is room, the beginning of the request first.

        Returns
        -------
        PrepareStoreOutput or None
            vLLM never offers again what is left out of it. None, which vLLM takes as a reason to offer the
            same again in the next step, is for no room at all, and for a prompt larger than the host, as long
            as these chunks would take the place of its beginning before any tier has that.
        """
        offered = keys if isinstance(keys, list) else list(keys)
        counts = self._threshold.active and not self._lookups.request(req_context).wishes.has_decoder
        admitted = self._threshold.admit(offered) if counts else offered
        try:
            output = self._reserve(admitted, req_context)
        except KVStoreError as error:
            self._complain(error)
            output = None
        if counts and output is not None:
            self._threshold.count(offered)
            self._telemetry.count("stores_refused", len(offered) - len(admitted))
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """All workers have copied; what arrived whole can be loaded, and goes on to the tiers."""
        try:
            lost = self._transfers.stored(req_context.req_id, keys, success=success)
        except KVStoreError as error:
            self._complain(error)
            return
        if lost:
            self._telemetry.count("stores_failed", lost)

    def _reserve(self, offered: list[bytes], context: ReqContext) -> PrepareStoreOutput | None:
        if not offered:
            return PrepareStoreOutput([], SlotSpec((), 0), [])
        lease, order = self._lease(offered, context)
        if not len(lease):
            if not lease.refused:
                return PrepareStoreOutput([], SlotSpec((), 0), [])
            self._note_computing(offered, context)
            return None
        state = self._lookups.request(context)
        wishes, slots = state.wishes, lease.slots
        if state.stored is not None:
            state.stored.extend(slots)
        self._retention.stored(list(slots), wishes.priority, wishes.ttl)
        if order is not None:
            slots = {key: slots[key] for key in order if key in slots}
        end = len(self._epoch)
        accepted = [key[:-end] for key in slots] if end else list(slots)
        self._note_computing(accepted, context)
        spec = self._transfers.store(
            context.req_id, accepted, lease, list(slots.values()), tiers=wishes.stores
        )
        return PrepareStoreOutput(accepted, spec, [])

    def _lease(self, offered: list[bytes], context: ReqContext) -> tuple[WriteLease, list[bytes] | None]:
        """A lease for as many of `offered` as fit; and their order, where the lease has them in another."""
        stored = self._stored(offered)
        earlier = self._earlier(stored, context)
        if not self._several:
            return self.store.reserve(stored, after=earlier), None
        # vLLM offers group after group, but half of the groups is no head.
        positions = key_positions(context)
        order = sorted(zip(offered, stored, strict=True), key=lambda pair: positions.get(pair[0], 0))
        return self.store.reserve([key for _, key in order], after=earlier), stored

    def _earlier(self, stored: list[bytes], context: ReqContext) -> Prefix | None:
        """The other chunks of a request that is larger than what it may have of the host: they could be those
        that have to go for `stored`."""
        state, positions = self._lookups.request(context), key_positions(context)
        if state.stored is None and len(positions) > self.store.room:
            new = set(stored)
            state.stored = Prefix(key for key in self._stored(positions) if key not in new)
        return state.stored

    def _note_computing(self, keys: list[bytes], context: ReqContext) -> None:
        """Say how many tokens the engine computes in this step, each once however often it is offered."""
        positions, state = key_positions(context), self._lookups.request(context)
        begin, end = max(state.computed, positions.get(keys[0], 0)), positions.get(keys[-1], 0)
        if end > begin:
            self._lookups.computing(end - begin)
            state.computed = end

    # The life of requests and of the cache.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has come; one with a decoder elsewhere has all its chunks stored, also those that the
        device had."""
        if self._lookups.request(req_context).wishes.has_decoder:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """A request has ended: its chunks have just been used, the first ones most of all."""
        self._lookups.finished(req_context.req_id)
        positions = key_positions(req_context)
        keys = sorted(positions, key=positions.__getitem__, reverse=True)
        try:
            self.store.renew(self._stored(keys))
        except KVStoreError as error:
            self._complain(error)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step ends: take in what the tiers have done, and let go of what nobody waits for."""
        try:
            self.store.poll()
            for request in context.new_req_ids:
                self._lookups.scheduled(request)
            for request in context.preempted_req_ids:
                self._lookups.preempted(request)
            self._lookups.step()
            self._transfers.sweep()
            self._retention.sweep()
            self._take_events()
        except KVStoreError as error:
            self._complain(error)

    def has_pending_work(self) -> bool:
        """Never: what goes on in the background needs no steps of the engine."""
        return False

    def reset_cache(self) -> None:
        """Forget everything: the weights may be others from now on.

        With ``on_reset=keep`` the tiers keep what they have.
        """
        self._telemetry.count("resets")
        if self._config.on_reset == "rekey":
            self._epoch = new_epoch()
        self._lookups.reset(self._epoch)
        self._transfers.drop()
        try:
            self._transfers.sweep()
            self.store.clear()
        except KVStoreError as error:
            self._complain(error)

    def shutdown(self) -> None:
        """Close the store; tiers get some seconds for what they are still owed."""
        self.store.close(_LAST_MOMENTS)
        self._transfers.close()

    # What vLLM reads.

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What has come and gone since the last call, of this epoch."""
        if self._events is None:
            return ()
        self._take_events()
        events, self._events = self._events, deque()
        tiers = self._config.tiers
        told = {tier.name for tier in tiers if tier.enable_kv_events}
        return to_offloading(
            events,
            host=self.store.config.host.name,
            epoch=self._epoch,
            localities={tier.name: tier.locality for tier in tiers},
            silent={tier.name for tier in self.store.config.tiers} - told,
        )

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Metrics since the last call; None when it is too early for them."""
        try:
            return self._telemetry.stats(self.store.stats)
        except KVStoreError as error:
            self._complain(error)
            return None

    def _take_events(self) -> None:
        """Let telemetry learn from the store's events, and keep them for vLLM if it takes them."""
        events = list(self.store.events())
        if events:
            self._telemetry.note(events)
            if self._events is not None:
                self._events.extend(events)

    def _stored(self, keys: Collection[bytes]) -> list[bytes]:
        """The store's keys for vLLM's."""
        if self._epoch:
            return [key + self._epoch for key in keys]
        return keys if isinstance(keys, list) else list(keys)

    def _complain(self, error: KVStoreError) -> None:
        """Log the first of the errors that storage must not make the engine's."""
        if not self._troubled:
            self._troubled = True
            _log.error("the store fails, and the engine goes on without it: %s", error)
