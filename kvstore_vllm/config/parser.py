"""The one way from ``kv_connector_extra_config`` to an :class:`AdapterConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.config import HostConfig, StoreConfig
from kvstore.errors import ConfigError

from .adapter import AdapterConfig, AdapterTier
from .keys import KEYS, check_names, read
from .native import NATIVE_NAMES, native_tier, own_tier

__all__ = ["parse"]

_WHERE = "kv_connector_extra_config"
_HOST_SIZES = ("cpu_bytes_to_use", "host_cache_size")
#: What ``tiers`` says itself.
_NATIVE = (*_HOST_SIZES, "eviction_policy", "secondary_tiers")
_WITHOUT_EFFECT = ("tier_poll_interval_s", "cache_policy_module_path", "backpressure")
_TAKEN = (
    "adapters",
    "affinity",
    "canonical_layout",
    "engine",
    "lookup_timeout",
    "max_tracker_size",
    "nice",
    "offload_prompt_only",
    "on_reset",
    "prefill_timeout",
    "promote_budget",
    "self_describing_kv_events",
    "store_threshold",
    "weights_id",
)


def parse(extra_config: Mapping[str, Any]) -> AdapterConfig:
    """Check a configuration in either of its forms and freeze it; nothing is opened, nothing is logged.

    Parameters
    ----------
    extra_config : mapping
        ``kv_connector_extra_config``.

    Raises
    ------
    ConfigError
        Something is not valid, a key is misspelt, or the two forms are mixed; the message is one line that
        names the key and the remedy.

    Examples
    --------
    >>> config = parse({"tiers": ["ram://?capacity=64GiB&policy=arc", "s3://bucket/kv"]})
    >>> config.capacity, config.policy, config.tiers[0].name, config.tiers[0].config.required
    (68719476736, 'arc', 's3', False)
    >>> config = parse({"cpu_bytes_to_use": 1e9, "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv"}]})
    >>> config.capacity, config.tiers[0].config.url
    (1000000000, 'file:///mnt/kv')
    """
    if not isinstance(extra_config, Mapping):
        raise ConfigError(f"{_WHERE} is a mapping, not {type(extra_config).__name__}")
    warnings = list(check_names(extra_config, KEYS, _WHERE))
    values = read(extra_config, KEYS, _WHERE)
    warnings += [f"{_WHERE}: {name!r} has no effect here" for name in _WITHOUT_EFFECT if values[name]]
    if values["tiers"] is not None:
        _refuse_mixture(extra_config)
        host, tiers = _own_form(values)
    else:
        host, tiers = _native_form(values, warnings)
    return AdapterConfig(
        host=host,
        tiers=_named(host, tiers),
        min_priority=values["secondary_offload_min_priority"],
        warnings=tuple(warnings),
        **{name: values[name] for name in _TAKEN},
    )


def _refuse_mixture(given: Mapping[str, Any]) -> None:
    for name in _NATIVE:
        if given.get(name) is not None:
            source = ", which --kv-offloading-size sets" if name == "cpu_bytes_to_use" else ""
            raise ConfigError(f"{_WHERE}: 'tiers' says what {name!r}{source} says too; keep one of the two")


def _own_form(values: Mapping[str, Any]) -> tuple[HostConfig, list[AdapterTier]]:
    tiers = [own_tier(tier) for tier in values["tiers"]]
    host = tiers[0] if tiers else None
    if not isinstance(host, HostConfig):
        raise ConfigError(f"{_WHERE}: tiers begins with the host tier, such as ram://?capacity=64GiB")
    secondary = [tier for tier in tiers[1:] if isinstance(tier, AdapterTier)]
    if len(secondary) < len(tiers) - 1:
        raise ConfigError(f"{_WHERE}: tiers has more than one host tier (ram://); keep the first")
    return host, secondary


def _native_form(values: Mapping[str, Any], warnings: list[str]) -> tuple[HostConfig, list[AdapterTier]]:
    tiers: list[AdapterTier] = []
    served: dict[str, Any] = {}
    for index, entry in enumerate(values["secondary_tiers"] or ()):
        tier, more = native_tier(entry, f"secondary_tiers[{index}]")
        warnings += more
        if isinstance(tier, AdapterTier):
            tiers.append(_numbered(tier, tiers))
        elif not served:
            served = tier.host
            tiers += [tier.peers] if tier.peers is not None else []
        else:
            raise ConfigError(f"secondary_tiers[{index}] (p2p): an instance binds one address; keep one")
    host = HostConfig(capacity=_host_size(values), policy=values["eviction_policy"], **served)
    return host, tiers


def _host_size(values: Mapping[str, Any]) -> int:
    given = [name for name in _HOST_SIZES if values[name]]
    if not given:
        raise ConfigError(
            f"{_WHERE}: there is no host memory; give tiers that begin with ram://?capacity=64GiB, "
            "or cpu_bytes_to_use"
        )
    if len(given) > 1:
        raise ConfigError(f"{_WHERE}: {given[0]!r} and {given[1]!r} say the same; keep one")
    return int(values[given[0]])


def _numbered(tier: AdapterTier, before: list[AdapterTier]) -> AdapterTier:
    """`tier`, with a number after its name if a tier of vLLM's form before it has got the same."""
    name = tier.name
    same = sum(other.name.partition("-")[0] == name for other in before) if name in NATIVE_NAMES else 0
    if not same:
        return tier
    config = msgspec.structs.replace(tier.config, name=f"{name}-{same + 1}")
    return msgspec.structs.replace(tier, config=config)


def _named(host: HostConfig, tiers: list[AdapterTier]) -> tuple[AdapterTier, ...]:
    """`tiers`, each with the name that it will have in the store."""
    named = StoreConfig(host=host, tiers=tuple(tier.config for tier in tiers), chunk_size=1).tiers
    return tuple(
        msgspec.structs.replace(tier, config=config) for tier, config in zip(tiers, named, strict=True)
    )
