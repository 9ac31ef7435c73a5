"""What vLLM's ``OffloadingConnector`` asks for: a worker for each rank, a manager for the scheduler.

vLLM makes one spec in every process of an engine. Workers come first: each joins the rendezvous with the
identity that it has established, and copies between its block tensors and the rows of the common arena. The
scheduler joins last, takes over the identity, and opens the store over the same arena.
"""

from __future__ import annotations

import logging
from typing import Any

import vllm
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstore.errors import ConfigError
from kvstore.opening import assemble

from . import _compat
from .acks import AckWords
from .config import check_topology, parse
from .copies import RowLayout, make_copier
from .identity import Identity, identity_of, with_hash_seed
from .manager import GroupInfo, KVStoreManager
from .rendezvous import Membership, join
from .telemetry import Telemetry, metric_definitions
from .worker import KVStoreWorker

__all__ = ["KVStoreOffloadingSpec"]

_log = logging.getLogger("kvstore")


class KVStoreOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """Offloads KV blocks into a :class:`kvstore.Store`; named as ``spec_name`` in the configuration.

    Parameters
    ----------
    config : OffloadingConfig
        From vLLM; its ``extra_config`` is what :func:`kvstore_vllm.config.parse` reads.

    Raises
    ------
    ConfigError
        The configuration is wrong, or the engine is one that cannot be served: it uses Ray or more than one
        node, or cannot use blocks from a cache.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.adapter = parse(config.extra_config)
        self.offload_prompt_only = self.adapter.offload_prompt_only
        self.replicated_layout = config.replicated_layout
        vllm_config = _compat.current_config()
        if vllm_config is not None:
            check_topology(vllm_config.parallel_config)
            if reason := _compat.unfit(vllm_config):
                raise ConfigError(reason)
        if config.worker_kv_bytes_per_block < 1:
            raise ConfigError("this engine has no KV cache, so there is nothing to offload")
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Definitions of the metrics that the manager reports; vLLM refuses others."""
        return metric_definitions()

    @property
    def chunk_size(self) -> int:
        """Bytes of a row of the arena: one chunk with the parts of all ranks, or the copy they share."""
        copies = 1 if self.replicated_layout else self.config.parallel.world_size
        return int(self.config.worker_kv_bytes_per_block) * copies * int(self.blocks_per_chunk)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """This rank's worker."""
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def get_manager(self) -> OffloadingManager:
        """The scheduler's manager."""
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        vllm_config = _compat.current_config()
        parallel = self.config.parallel
        layout = RowLayout.of(
            kv_caches,
            rank=parallel.rank,
            world_size=parallel.world_size,
            blocks_per_chunk=self.blocks_per_chunk,
            chunk_size=self.chunk_size,
            canonical=self.config.canonical_layout,
            replicated=self.replicated_layout,
        )
        windows = _compat.window_chunks(self.config.groups, vllm_config, self.blocks_per_chunk)
        self._check_windows(windows)
        member = self._join(
            rank=parallel.rank,
            identity=self._identity(vllm_config, kv_caches),
            facts={"windows": windows},
            pin=self.adapter.host.pin,
        )
        try:
            copier = make_copier(layout, member.arena)
            return _Worker(member, layout, copier, self._acks(member), parallel.rank)
        except BaseException:
            member.close()
            raise

    def _make_manager(self) -> OffloadingManager:
        for line in filter(None, (_compat.check_version(vllm.__version__), *self.adapter.warnings)):
            _log.warning("%s", line)
        member = self._join(rank=None)
        try:
            identity = with_hash_seed(member.identity)
            if identity.warning:
                _log.warning("%s", identity.warning)
            options = self.adapter.store_options(
                self.chunk_size, identity.fields, replica=self.config.parallel.data_parallel_index
            )
            store = assemble(options, arena=member.arena)
        except BaseException:
            member.close()
            raise
        groups = [
            GroupInfo(group.group_id, group.tokens_per_block, window)
            for group, window in zip(self.config.groups, member.facts["windows"], strict=True)
        ]
        return _Manager(
            member,
            store,
            self._acks(member),
            self.adapter,
            groups,
            Telemetry(store.config),
            kv_events=self.kv_events_config.enable_kv_cache_events,
        )

    def _check_windows(self, windows: list[int | None]) -> None:
        """Refuse chunks of several blocks where a group keeps only the end of a prefix.

        vLLM stores such a chunk with the blocks that are left of it, under the key of the whole; a request
        whose prefix ends elsewhere would load the holes. Nobody can tell where these are: the manager is
        given keys, and a worker the blocks of all chunks in one row.
        """
        if self.blocks_per_chunk > 1 and any(window is not None for window in windows):
            raise ConfigError(
                f"chunks of {self.blocks_per_chunk} blocks do not go with this model's sliding windows, "
                "local attention or states, which may leave a chunk partly empty: set blocks_per_chunk=1"
            )

    def _identity(self, vllm_config: Any | None, kv_caches: CanonicalKVCaches) -> Identity:
        if vllm_config is None:
            return Identity({}, ("the model (this version of vLLM does not tell its plug-ins)",))
        return identity_of(vllm_config, self.config, kv_caches=kv_caches)

    def _join(self, **options: Any) -> Membership:
        return join(
            self.config.engine_id, capacity=self.adapter.capacity, chunk_size=self.chunk_size, **options
        )

    def _acks(self, member: Membership) -> AckWords:
        """Words of all ranks; where they hold equal bytes vLLM has only the first one store."""
        one = self.replicated_layout and not self.config.canonical_layout
        return AckWords(member.arena.control, self.config.parallel.world_size, writers=1 if one else None)


class _Worker(KVStoreWorker):
    """A worker that leaves the rendezvous when it ends."""

    def __init__(self, member: Membership, *arguments: Any) -> None:
        super().__init__(member.arena, *arguments)
        self._member = member

    def shutdown(self) -> None:
        super().shutdown()
        self._member.close()


class _Manager(KVStoreManager):
    """A manager that leaves the rendezvous when it ends."""

    def __init__(self, member: Membership, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._member = member

    def shutdown(self) -> None:
        super().shutdown()
        self._member.close()
