"""Configuration of the vLLM adapter: both forms mean what they say, slips are refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from adapter_forms import FS, GIB, HOST, OBJ, SECRET, native

from kvstore.config import StoreConfig, TierConfig
from kvstore.errors import ConfigError
from kvstore_vllm.config import KEYS, AdapterConfig, check_topology, parse


def test_own_form() -> None:
    tiers = ["ram://?capacity=64GiB&policy=arc", "file:///mnt/kv?capacity=2TiB", "s3://bucket/kv"]
    config = parse({"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore_vllm", "tiers": tiers})
    assert (config.capacity, config.policy, config.pin) == (64 * GIB, "arc", "auto")
    assert [tier.name for tier in config.tiers] == ["file", "s3"]
    assert config.tiers[0].config.capacity == 2 * 2**40
    assert config.warnings == ()


def test_defaults() -> None:
    config = parse({"tiers": [HOST]})
    assert (config.offload_prompt_only, config.self_describing_kv_events, config.canonical_layout) == (
        True,
        False,
        False,
    )
    assert (config.store_threshold, config.max_tracker_size, config.min_priority) == (0, 64_000, 35)
    assert (config.on_reset, config.adapters, config.weights_id) == ("rekey", "private", None)
    assert (config.engine, config.nice, config.affinity) == ("processes", None, None)
    assert (config.tiers, config.host.serve) == ((), None)


@pytest.mark.parametrize(
    ("given", "attribute", "value"),
    [
        ({"offload_prompt_only": False}, "offload_prompt_only", False),
        ({"self_describing_kv_events": True}, "self_describing_kv_events", True),
        ({"canonical_layout": True}, "canonical_layout", True),
        ({"store_threshold": 2}, "store_threshold", 2),
        ({"max_tracker_size": 10}, "max_tracker_size", 10),
        ({"secondary_offload_min_priority": 0}, "min_priority", 0),
        ({"lookup_timeout": "50ms"}, "lookup_timeout", 0.05),
        ({"promote_budget": 0.25}, "promote_budget", 0.25),
        ({"on_reset": "keep"}, "on_reset", "keep"),
        ({"adapters": "immutable"}, "adapters", "immutable"),
        ({"weights_id": "v2"}, "weights_id", "v2"),
        ({"engine": "threads"}, "engine", "threads"),
        ({"nice": 5}, "nice", 5),
        ({"affinity": [1, 0]}, "affinity", (0, 1)),
    ],
)
def test_settings(given: dict[str, Any], attribute: str, value: Any) -> None:
    assert getattr(parse({"tiers": [HOST], **given}), attribute) == value


# Host memory as vLLM and others name it


@pytest.mark.parametrize("size", [GIB, float(GIB), "1GiB", 1.0000000001 * GIB])
@pytest.mark.parametrize("name", ["cpu_bytes_to_use", "host_cache_size"])
def test_host_size(name: str, size: Any) -> None:
    """``--kv-offloading-size`` computes a float."""
    assert parse({name: size}).capacity == GIB


def test_eviction_policy() -> None:
    assert parse({"cpu_bytes_to_use": GIB}).policy == "lru"
    assert parse({"cpu_bytes_to_use": GIB, "eviction_policy": "arc"}).policy == "arc"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no host memory"),
        ({"cpu_bytes_to_use": 0}, "no host memory"),
        ({"cpu_bytes_to_use": -1.0}, "cpu_bytes_to_use: not a size"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use: not a size"),
        ({"cpu_bytes_to_use": float("nan")}, "cpu_bytes_to_use: not a size"),
        ({"cpu_bytes_to_use": 1, "host_cache_size": 1}, "keep one"),
        ({"cpu_bytes_to_use": 1, "eviction_policy": "MyPolicy"}, "eviction_policy: not a choice: 'MyPolicy'"),
        ({"tiers": []}, "begins with the host tier"),
        ({"tiers": "ram://?capacity=1GiB"}, "tiers: not a list"),
        ({"tiers": ["/mnt/kv", HOST]}, "begins with the host tier"),
        ({"tiers": [HOST, HOST]}, "more than one host tier"),
        ({"tiers": [HOST, 7]}, "a tier is a URL"),
        ({"tiers": [HOST, "/mnt/kv?capcity=1GiB"]}, "did you mean 'capacity'"),
        ({"tiers": [HOST, "/a?name=x", "/b?name=x"]}, "given to two tiers"),
        ({"tiers": [HOST], "offload_prompt_only": "false"}, "offload_prompt_only: neither true nor false"),
        ({"tiers": [HOST], "promote_budget": 1.5}, "promote_budget: not a share"),
        ({"tiers": [HOST], "store_threshold": -1}, "store_threshold: not a whole number"),
        ({"tiers": [HOST], "on_reset": "kep"}, "did you mean 'keep'"),
        ({"tiers": [HOST], "lookup_timeout": 0}, "more than zero"),
    ],
)
def test_wrong_values(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_bytes_to_use", GIB),
        ("host_cache_size", GIB),
        ("eviction_policy", "lru"),
        ("secondary_tiers", []),
    ],
)
def test_forms_are_not_mixed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'tiers' says what '{name}'.* says too"):
        parse({"tiers": [HOST], name: value})


# Names of keys


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("tier", "tiers"),
        ("tires", "tiers"),
        ("Tiers", "tiers"),
        ("cpu-bytes-to-use", "cpu_bytes_to_use"),
        ("cpu_byte_to_use", "cpu_bytes_to_use"),
        ("secondary_tier", "secondary_tiers"),
        ("eviction_polcy", "eviction_policy"),
        ("block_per_chunk", "blocks_per_chunk"),
        ("canonical_layuot", "canonical_layout"),
        ("on_resets", "on_reset"),
    ],
)
def test_a_slip_is_an_error_that_names_what_was_meant(slip: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{slip}'; did you mean '{meant}'"):
        parse({"tiers": [HOST], slip: 1})


@pytest.mark.parametrize("name", ["kv_ip", "cpu_bytes_to_use_per_rank", "max_num_seqs"])
def test_other_unknown_keys_are_warnings(name: str) -> None:
    config = parse({"tiers": [HOST], name: SECRET})
    assert config.warnings == (f"kv_connector_extra_config: unknown key '{name}' is ignored",)


def test_every_known_key_is_taken_without_a_warning() -> None:
    quiet = set(KEYS) - {"cpu_bytes_to_use", "host_cache_size", "eviction_policy", "secondary_tiers"}
    values: dict[str, Any] = {"tiers": [HOST], "cache_policy_module_path": None, "backpressure": None}
    values |= {"block_size": 64, "blocks_per_chunk": 1, "spec_name": "x", "spec_module_path": "y"}
    values |= {name: KEYS[name].default for name in quiet - set(values)}
    assert parse(values).warnings == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tier_poll_interval_s", 0.01),
        ("cache_policy_module_path", "m"),
        ("backpressure", {"backpressure_cls": "E"}),
    ],
)
def test_known_keys_without_effect_are_warnings(name: str, value: Any) -> None:
    [warning] = parse({"tiers": [HOST], name: value}).warnings
    assert name in warning
    assert "no effect" in warning


# Whether a tier is required


@pytest.mark.parametrize(
    ("tier", "required"),
    [
        ("/mnt/kv", False),
        ("/mnt/kv?required=true", True),
        ({"url": "/mnt/kv"}, False),
        ({"url": "/mnt/kv", "required": True}, True),
        ({"url": "/mnt/kv?required=true"}, True),
        ({"url": "/mnt/kv?capacity=1GiB", "required": "false"}, False),
    ],
)
def test_tiers_are_not_required_unless_they_say_so(tier: Any, required: bool) -> None:
    assert parse({"tiers": [HOST, tier]}).tiers[0].config.required is required


def test_native_tiers_are_not_required() -> None:
    config = parse(native(FS, {"type": "obj", **OBJ}, {"type": "KVStoreTier", "url": "memory://x"}))
    assert [tier.config.required for tier in config.tiers] == [False, False, False]


# Peers


def served(config: AdapterConfig, replica: int = 0) -> str | None:
    return config.store_options(4096, {}, replica=replica).host.serve


def test_p2p_is_where_the_host_tier_is_served() -> None:
    secret = {"token": SECRET * 3}
    config = parse(native({"type": "p2p", "host": "10.0.0.1", "port": 6000, "storage_options": secret}, FS))
    assert config.host.storage_options == secret
    assert SECRET not in repr(config)
    assert [served(config, replica) for replica in (0, 2)] == ["tcp://10.0.0.1:6000", "tcp://10.0.0.1:6002"]
    assert [tier.name for tier in config.tiers] == ["p2p", "fs"]
    assert config.warnings == ()


def test_p2p_lets_requests_name_peers_that_know_the_same_token() -> None:
    secret = {"token": SECRET * 3}
    entry = {"type": "p2p", "allow": ["10.0.0.0/16"], "peers": 2, "locality": "REMOTE"}
    [peers] = parse(native({**entry, "storage_options": secret})).tiers
    assert (peers.config.url, peers.config.dials, peers.locality) == ("peer://", True, "REMOTE")
    assert (peers.config.allow, peers.config.peers) == (("10.0.0.0/16",), 2)
    assert peers.config.storage_options == secret
    [anyhow] = parse(native({"type": "p2p"})).tiers
    assert anyhow.config.allow == ("loopback",)


def test_p2p_with_curvezmq_has_no_keys_to_show_peers() -> None:
    keys = {"curve_secret_key": "s" * 40, "allowed_keys": ["p" * 40]}
    config = parse(native({"type": "p2p", "storage_options": keys}))
    assert config.tiers == ()
    [warning] = config.warnings
    assert "add a tier peer:// with its keys" in warning


def test_p2p_has_the_defaults_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(parse(native({"type": "p2p"}))) == "tcp://localhost:5710"
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "::1")
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_PORT", "7000")
    assert served(parse(native({"type": "p2p"}))) == "tcp://[::1]:7000"


@pytest.mark.parametrize(
    ("name", "value"),
    [("backends", ["UCX"]), ("num_threads", 4), ("unbound_store_timeout_s", 60), ("enable_kv_events", True)],
)
def test_keys_of_p2p_without_effect_are_warnings(name: str, value: Any) -> None:
    [warning] = parse(native({"type": "p2p", name: value})).warnings
    assert warning == f"secondary_tiers[0] (p2p): {name!r} has no effect here"


def test_serve_in_our_form_is_of_the_first_replica() -> None:
    config = parse({"tiers": [f"{HOST}&serve=:6000"]})
    assert served(config, 1) == "tcp://127.0.0.1:6001"
    anywhere = parse({"tiers": [f"{HOST}&serve=:0"]})
    assert served(anywhere, 1) == "tcp://127.0.0.1:0"
    with pytest.raises(ConfigError, match="replica 3 would listen at port 65536"):
        served(parse({"tiers": [f"{HOST}&serve=:65533"]}), 3)


def test_peers_are_tiers() -> None:
    secret = {"token": SECRET * 3}
    peer = {"url": "peer://10.0.0.1:5710?timeout=2s", "storage_options": secret, "locality": "REMOTE"}
    [ours] = parse({"tiers": [HOST, peer]}).tiers
    assert (ours.name, ours.locality, ours.config.required) == ("peer", "REMOTE", False)
    assert (ours.config.write, ours.config.timeout) == ("off", 2.0)
    assert ours.config.storage_options == secret
    assert parse(native({"type": "KVStoreTier", **peer})).tiers == (ours,)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ([{"type": "p2p"}, {"type": "p2p"}], "secondary_tiers[1] (p2p): an instance binds one address"),
        ([{"type": "p2p", "host": "a/b"}], "secondary_tiers[0] (p2p): serve: not an address"),
        ([{"type": "p2p", "port": 65536}], "secondary_tiers[0] (p2p): port: not a whole number"),
        ([{"type": "p2p", "hosts": "h"}], "did you mean 'host'"),
        ([{"type": "p2p", "storage_options": SECRET}], "storage_options: not a mapping"),
    ],
)
def test_wrong_peers(tiers: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        parse(native(*tiers))
    assert SECRET not in str(caught.value)


# What comes of it


def test_store_options() -> None:
    config = parse({"tiers": ["ram://?capacity=1GiB&pin=off", "/mnt/kv"], "nice": 3, "engine": "threads"})
    store = config.store_options(4 << 20, {"model": "m"})
    assert store == StoreConfig(
        host=config.host,
        tiers=(TierConfig(url="/mnt/kv", name="file", required=False),),
        namespace={"model": "m"},
        chunk_size=4 << 20,
        engine="threads",
        nice=3,
    )
    with pytest.raises(ConfigError, match="below one chunk"):
        config.store_options(2 << 30, {})


@pytest.mark.parametrize("given", [None, [], "tiers"])
def test_what_is_no_mapping(given: Any) -> None:
    with pytest.raises(ConfigError, match="is a mapping"):
        parse(given)


def parallel(use_ray: bool = False, nodes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(use_ray=use_ray, nnodes_within_dp=nodes)


def test_topology() -> None:
    check_topology(parallel())
    with pytest.raises(ConfigError, match="Ray"):
        check_topology(parallel(use_ray=True))
    with pytest.raises(ConfigError, match="spans 2"):
        check_topology(parallel(nodes=2))
