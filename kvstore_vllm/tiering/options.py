"""The tier's entry in ``secondary_tiers``, and the namespace of what it stores.

What makes bytes interchangeable is only partly in sight here: vLLM tells a secondary tier the model's name,
the cache's data type and layout, and how the engine is parallelized; not the content of the weights, nor the
attention backend, nor whether there are adapters. Whoever configures the tier answers for the rest with
``namespace``. Without it, what is stored is of use to this run only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from kvstore.config import HostConfig, StoreConfig
from kvstore.errors import ConfigError
from kvstore.keys import plain_fields

from ..config import KEYS, AdapterTier, secondary_tier
from ..config.keys import TIER_TYPE, read
from ..weights import fingerprint, local_directory
from .transfers import HOST

__all__ = ["TierOptions", "visible_fields"]

_SIZES = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_SETTINGS = {name: KEYS[name] for name in ("engine", "on_reset", "nice", "affinity")}


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one entry says.

    Attributes
    ----------
    tier : AdapterTier
    namespace : dict or None
        The caller's fields; None where there are none.
    on_reset : {"rekey", "keep"}
    engine, nice, affinity
        As in :class:`kvstore.config.StoreConfig`.
    """

    tier: AdapterTier
    namespace: dict[str, Any] | None
    on_reset: Literal["rekey", "keep"]
    engine: Literal["threads", "processes", "inline"]
    nice: int | None
    affinity: tuple[int, ...] | None

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Self:
        """Read an entry, without ``type`` and what else vLLM has taken out.

        Raises
        ------
        ConfigError
            It is not valid.
        """
        if not isinstance(entry.get("url"), str):
            raise ConfigError(f"{TIER_TYPE}: 'url' is missing, such as s3://bucket/kv")
        namespace = entry.get("namespace")
        if namespace is not None:
            if not isinstance(namespace, Mapping) or not namespace:
                raise ConfigError(
                    f'{TIER_TYPE}: namespace is a mapping, such as {{"weights": "qwen3-8b-r2"}}'
                )
            namespace = plain_fields(namespace)
        own = {*_SETTINGS, "namespace"}
        tier = secondary_tier({name: value for name, value in entry.items() if name not in own})
        if tier.config.dials:
            raise ConfigError(
                f"{TIER_TYPE}: peer:// without an address is for requests that name their peers, which "
                "KVStoreOffloadingSpec takes; write peer://host:port"
            )
        if tier.config.write == "on-evict":
            raise ConfigError(
                f"{TIER_TYPE}: write=on-evict cannot be had, for vLLM does not say what it is about to "
                "evict; use write=through, or KVStoreOffloadingSpec"
            )
        return cls(tier=tier, namespace=namespace, **read(entry, _SETTINGS, TIER_TYPE))

    def store_config(self, seen: Mapping[str, Any], slots: int, slot_size: int) -> StoreConfig:
        """Configuration of the engine below `slots` rows of `slot_size` bytes.

        Parameters
        ----------
        seen : mapping
            Identity fields that the tier can see, from :func:`visible_fields`.

        Raises
        ------
        ConfigError
            The tier has no room for a single row.
        """
        rest = {"given": self.namespace} if self.namespace else {"run": os.urandom(16).hex()}
        return StoreConfig(
            host=HostConfig(name=HOST, capacity=slots * slot_size),
            tiers=(self.tier.config,),
            namespace={**seen, **rest},
            chunk_size=slot_size,
            engine=self.engine,
            nice=self.nice,
            affinity=self.affinity,
        )


def visible_fields(config: Any, *, replicated: bool) -> dict[str, Any]:
    """Identity fields of rows, as far as vLLM shows them to a tier.

    Parameters
    ----------
    config : vllm.v1.kv_offload.config.OffloadingConfig
    replicated : bool
        Whether a row holds one copy of what all ranks have alike.

    Returns
    -------
    dict
        A row in the direct layout is made of the parts of all ranks, so that it depends on how the engine is
        parallelized, whatever vLLM's configuration says. One in the canonical layout does not, where vLLM
        vouches for it: its workers refuse to start when they cannot keep that promise.
    """
    parallel = config.parallel
    portable = config.canonical_layout and parallel.is_parallelism_agnostic
    return {
        "engine": "vllm",
        "model": config.model.name,
        "files": _weights(config.model.name),
        "dtype": str(config.model.dtype),
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "canonical": bool(config.canonical_layout),
        "replicated": replicated,
        "kv_cache_layout": config.kv_cache_layout,
        "ranks": "any" if portable else {size: getattr(parallel, size) for size in _SIZES},
    }


def _weights(model: str) -> str | None:
    """Fingerprint of the files of a model, where they are in sight: the name stays when its files change."""
    try:
        directory = local_directory(model, None, None)
        return None if directory is None else fingerprint(directory)
    except (OSError, ValueError):
        return None
