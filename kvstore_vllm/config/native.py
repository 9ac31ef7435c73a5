"""Secondary tiers as vLLM's own tiering writes them, turned into ours.

``fs`` becomes a ``file://`` tier and ``obj`` an ``s3://`` tier; the address of ``p2p``, at which this
instance serves its peers, is said of the host tier, and the peers that requests name are a tier ``peer://``;
``KVStoreTier`` is ours already. Credentials go into
``storage_options``, never into a URL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.address import Address
from kvstore.config import OPTIONS, HostConfig, TierConfig
from kvstore.config.tiers import read_tier
from kvstore.config.urls import split_url
from kvstore.errors import ConfigError
from kvstore.remedies import nearest

from .adapter import AdapterTier
from .keys import TIER_KEYS, TIER_TYPE, check_names, read

__all__ = ["NATIVE_NAMES", "Peering", "native_tier", "own_tier", "secondary_tier"]

NATIVE_NAMES = ("fs", "obj")
"""Names of tiers that vLLM's form gives none: their types, as in the labels of vLLM's own metrics."""

_MOST_WORKERS = 8
_EVENT_KEYS = ("enable_kv_events", "locality")
_VLLM_KEYS = ("type", "module_path", "backpressure")
_WITHOUT_EFFECT = {
    "p2p": ("backpressure", "backends", "num_threads", "unbound_store_timeout_s", "enable_kv_events"),
}


class Peering(NamedTuple):
    """What ``p2p`` becomes: fields of :class:`kvstore.config.HostConfig`, and the tier of the peers that
    requests name."""

    host: dict[str, Any]
    peers: AdapterTier | None


def native_tier(entry: Mapping[str, Any], where: str) -> tuple[AdapterTier | Peering, tuple[str, ...]]:
    """One entry of ``secondary_tiers``, and warnings about keys of it.

    Raises
    ------
    ConfigError
        It is not valid; the message begins with `where`.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: a tier is a mapping with a type, not {type(entry).__name__}")
    kind = entry.get("type")
    if not isinstance(kind, str) or kind not in TIER_KEYS:
        remedy = nearest(kind, TIER_KEYS) if isinstance(kind, str) else f"valid: {', '.join(TIER_KEYS)}"
        raise ConfigError(f"{where}: not a type of tier that kvstore_vllm serves: {kind!r}; {remedy}")
    where = f"{where} ({kind})"
    useless = _WITHOUT_EFFECT.get(kind, ("backpressure",))
    warnings = [f"{where}: {name!r} has no effect here" for name in useless if entry.get(name)]
    if kind == TIER_TYPE:
        return secondary_tier(entry), tuple(warnings)
    keys = TIER_KEYS[kind]
    if kind == "obj":
        entry = _flattened(entry, where)
    warnings += check_names(entry, keys, where)
    values = read(entry, keys, where)
    if kind == "p2p":
        peering = _peering(values, where)
        if peering.peers is None:
            warnings.append(
                f"{where}: requests name no peers where CurveZMQ is used; add a tier peer:// with its keys"
            )
        return peering, tuple(warnings)
    config = _file_tier(values, where) if kind == "fs" else _object_tier(values, where)
    events = {name: values[name] for name in _EVENT_KEYS}
    return AdapterTier(config=config, **events), tuple(warnings)


def secondary_tier(entry: Mapping[str, Any]) -> AdapterTier:
    """A tier of ours among vLLM's: ``url`` and its options, as ``{"type": "KVStoreTier", ...}`` has them.

    Raises
    ------
    ConfigError
        It is not valid, or is host memory.
    """
    tier = own_tier({name: value for name, value in entry.items() if name not in _VLLM_KEYS})
    if isinstance(tier, HostConfig):
        raise ConfigError(f"secondary_tiers: {TIER_TYPE} is a tier below host memory, not ram://")
    return tier


def own_tier(tier: str | Mapping[str, Any]) -> HostConfig | AdapterTier:
    """A tier in one of kvstore's forms, which is not required unless it says so.

    Raises
    ------
    ConfigError
        It is not valid.
    """
    if isinstance(tier, str):
        tier = {"url": tier}
    if not isinstance(tier, Mapping) or not isinstance(tier.get("url"), str):
        raise ConfigError("tiers: a tier is a URL, or a mapping with one under 'url'")
    fields = dict(tier)
    keys = {name: TIER_KEYS[TIER_TYPE][name] for name in _EVENT_KEYS if name in fields}
    events = read(
        {name: fields.pop(name) for name in keys}, keys, f"tier {fields['url'].partition('?')[0]!r}"
    )
    location, query = split_url(fields["url"])
    if location != "ram://" and "required" not in {*query, *fields}:
        fields["required"] = False
    config = read_tier(fields)
    if isinstance(config, TierConfig):
        return AdapterTier(config=config, **events)
    if events:
        raise ConfigError(f"tier {config.name!r}: {next(iter(events))!r} is a key of secondary tiers")
    return config


def _flattened(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An ``obj`` entry with the keys of its ``store_config`` beside it."""
    inner = TIER_KEYS["obj"]["store_config"].parse(entry.get("store_config"), where) or {}
    for name in inner:
        if name in entry:
            raise ConfigError(f"{where}: {name!r} is given twice, in store_config and beside it")
    return {**{name: value for name, value in entry.items() if name != "store_config"}, **inner}


def _file_tier(values: Mapping[str, Any], where: str) -> TierConfig:
    root = _required(values, "root_dir", where)
    threads = max(values["n_read_threads"] or 0, values["n_write_threads"] or 0)
    # Workers are processes here, and each moves gigabytes in a second.
    workers = min(threads, _MOST_WORKERS, len(os.sched_getaffinity(0))) or OPTIONS["workers"].default
    return TierConfig(url=Path(os.path.abspath(root)).as_uri(), name="fs", workers=workers, required=False)


def _object_tier(values: Mapping[str, Any], where: str) -> TierConfig:
    bucket = _required(values, "bucket", where)
    prefix = values["prefix"].strip("/")
    return TierConfig(
        url=f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}",
        name="obj",
        concurrency=values["io_threads"] or OPTIONS["concurrency"].default,
        required=False,
        storage_options=_storage_options(values, where),
    )


def _storage_options(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments of s3fs."""
    if bool(values["access_key"]) != bool(values["secret_key"]):
        raise ConfigError(f"{where}: access_key and secret_key go together; give both or neither")
    endpoint = values["endpoint_override"]
    if endpoint and "://" not in endpoint:
        endpoint = f"{values['scheme']}://{endpoint}"
    client = {"region_name": values["region"], "verify": values["ca_bundle"]}
    options = {
        "endpoint_url": endpoint,
        "key": values["access_key"],
        "secret": values["secret_key"],
        "token": values["session_token"],
        "client_kwargs": {name: value for name, value in client.items() if value},
    }
    return {name: value for name, value in options.items() if value}


def _peering(values: Mapping[str, Any], where: str) -> Peering:
    """How the host tier is served, and peers are read: with the same token, if any."""
    keys = TIER_KEYS["p2p"]
    host = values["host"] or os.environ.get("VLLM_P2P_SIDE_CHANNEL_HOST", "localhost")
    port = values["port"] or keys["port"].parse(os.environ.get("VLLM_P2P_SIDE_CHANNEL_PORT", 5710), where)
    serve = OPTIONS["serve"].parse(str(Address(host, port)), where)
    secrets = values["storage_options"] or {}
    peers = None
    if not secrets.keys() - {"token"}:
        config = TierConfig(
            url="peer://",
            name="p2p",
            required=False,
            storage_options=secrets,
            **{name: values[name] for name in ("allow", "peers", "transport")},
        )
        peers = AdapterTier(config=config, locality=values["locality"])
    served = {"serve": serve, "transport": values["transport"], "storage_options": secrets}
    return Peering(served, peers)


def _required(values: Mapping[str, Any], name: str, where: str) -> str:
    if not values[name]:
        raise ConfigError(f"{where}: {name!r} is missing")
    return str(values[name])
