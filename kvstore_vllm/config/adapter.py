"""What the adapter is told, checked and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvstore.address import Address
from kvstore.config import HostConfig, StoreConfig, TierConfig
from kvstore.errors import ConfigError

__all__ = ["AdapterConfig", "AdapterTier"]

_LAST_PORT = 65535


class AdapterTier(msgspec.Struct, frozen=True, kw_only=True):
    """A secondary tier, and what vLLM's KV events say of it.

    Attributes
    ----------
    config : TierConfig
        With a name of its own.
    locality : {"LOCAL", "REMOTE"} or None
        None is unspecified.
    enable_kv_events : bool
    """

    config: TierConfig
    locality: Literal["LOCAL", "REMOTE"] | None = None
    enable_kv_events: bool = False

    @property
    def name(self) -> str:
        """Name of the tier in metrics, events and messages."""
        return self.config.name


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``kv_connector_extra_config`` says; made by :func:`kvstore_vllm.config.parse`.

    Attributes
    ----------
    host : HostConfig
        Its capacity is the total over all workers of the engine; where peers may read, its address is that of
        the first data-parallel replica.
    tiers : tuple of AdapterTier
        In the order in which they are asked.
    offload_prompt_only, self_describing_kv_events, canonical_layout : bool
    store_threshold : int
        Offers of a chunk until it is stored.
    max_tracker_size : int
        Chunks whose offers are counted.
    min_priority : int
        Retention priority, 0 to 100, from which chunks go to secondary tiers.
    lookup_timeout : float
        Seconds that a request may be deferred.
    prefill_timeout : float
        Seconds that a request may wait for chunks that a peer is computing for it.
    promote_budget : float
        Share of the host tier that may be filled by promotions.
    on_reset : {"rekey", "keep"}
    adapters : {"private", "immutable"}
    weights_id : str or None
        Stands for the content of the weights.
    engine, nice, affinity
        As in :class:`kvstore.config.StoreConfig`.
    warnings : tuple of str
        Lines for whoever runs the engine, to be logged once.
    """

    host: HostConfig
    tiers: tuple[AdapterTier, ...] = ()
    offload_prompt_only: bool
    self_describing_kv_events: bool
    canonical_layout: bool
    store_threshold: int
    max_tracker_size: int
    min_priority: int
    lookup_timeout: float
    prefill_timeout: float
    promote_budget: float
    on_reset: Literal["rekey", "keep"]
    adapters: Literal["private", "immutable"]
    weights_id: str | None
    engine: Literal["threads", "processes", "inline"]
    nice: int | None
    affinity: tuple[int, ...] | None
    warnings: tuple[str, ...] = ()

    @property
    def capacity(self) -> int:
        """Bytes of host memory over all workers."""
        return self.host.capacity

    @property
    def policy(self) -> Literal["lru", "arc", "priority"]:
        """Eviction policy of the host tier."""
        return self.host.policy

    @property
    def pin(self) -> Literal["auto", "on", "off"]:
        """Whether host memory is pinned for device copies."""
        return self.host.pin

    def store_options(
        self, chunk_size: int, namespace: Mapping[str, Any], *, replica: int = 0
    ) -> StoreConfig:
        """Configuration of the store that this engine's scheduler opens.

        Parameters
        ----------
        chunk_size : int
            Bytes of a chunk with the parts of all workers.
        namespace : mapping
            Identity fields, see :mod:`kvstore_vllm.identity`.
        replica : int
            Data-parallel index of the engine, which is added to the port that it serves peers at.

        Raises
        ------
        ConfigError
            A tier has no room for a single chunk, or there is no such port.
        """
        return StoreConfig(
            host=_of_replica(self.host, replica),
            tiers=tuple(tier.config for tier in self.tiers),
            namespace=dict(namespace),
            chunk_size=chunk_size,
            engine=self.engine,
            nice=self.nice,
            affinity=self.affinity,
        )


def _of_replica(host: HostConfig, replica: int) -> HostConfig:
    """`host` with the address of one replica; port 0 is any that is free, for all of them."""
    if host.serve is None:
        return host
    address = Address.parse(host.serve)
    port = address.port and address.port + replica
    if port > _LAST_PORT:
        raise ConfigError(f"tier {host.name!r}: serve: replica {replica} would listen at port {port}")
    return msgspec.structs.replace(host, serve=str(address._replace(port=port)))
