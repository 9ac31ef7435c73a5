"""Configuration of the vLLM adapter: both forms mean what they say, slips are refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import StoreConfig, TierConfig
from kvstore.errors import ConfigError
from kvstore_vllm.config import KEYS, AdapterConfig, AdapterTier, check_topology, parse, secondary_tier

GIB = 2**30
HOST = "ram://?capacity=64GiB"
SECRET = "hunter2"
FS = {"type": "fs", "root_dir": "/mnt/kv"}
OBJ = {"bucket": "b", "endpoint_override": "10.0.0.1:9000", "access_key": "alice", "secret_key": SECRET}


def native(*tiers: Any, **more: Any) -> dict[str, Any]:
    return {"cpu_bytes_to_use": GIB, "secondary_tiers": list(tiers), **more}


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
    ("name", "value"), [("cache_policy_module_path", "m"), ("backpressure", {"backpressure_cls": "E"})]
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


# vLLM's own tiers


def test_fs() -> None:
    [tier] = parse(native(FS)).tiers
    assert tier == AdapterTier(config=TierConfig(url="/mnt/kv", name="fs", required=False))


@pytest.mark.parametrize(
    ("threads", "workers"),
    [
        ({"n_read_threads": 1, "n_write_threads": 1}, 1),
        ({"n_write_threads": 3}, 3),
        ({"n_read_threads": 64}, 4),
    ],
)
def test_threads_of_fs_become_workers(
    threads: dict[str, int], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(4)))
    assert parse(native({**FS, **threads})).tiers[0].config.workers == workers


@pytest.mark.parametrize(
    ("root", "url"),
    [
        ("/mnt/kv/", "file:///mnt/kv"),
        ("~/kv?x", "file:///here/~/kv%3Fx"),
        ("s3:x", "file:///here/s3%3Ax"),
    ],
)
def test_root_dir_is_a_path_as_it_stands(root: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    assert parse(native({**FS, "root_dir": root})).tiers[0].config.url == url


@pytest.mark.parametrize("nested", [True, False], ids=["store_config", "flat"])
def test_obj(nested: bool) -> None:
    connection = {**OBJ, "session_token": "t", "region": "eu", "scheme": "https", "ca_bundle": "/ca.pem"}
    given = {"store_config": connection} if nested else connection
    [tier] = parse(native({"type": "obj", "prefix": "/kv/", "io_threads": 4, **given})).tiers
    assert tier.config == TierConfig(
        url="s3://b/kv",
        name="obj",
        concurrency=4,
        required=False,
        storage_options={
            "endpoint_url": "https://10.0.0.1:9000",
            "key": "alice",
            "secret": SECRET,
            "token": "t",
            "client_kwargs": {"region_name": "eu", "verify": "/ca.pem"},
        },
    )


def test_obj_without_credentials_leaves_them_to_the_client() -> None:
    connection = {"bucket": "b", "endpoint_override": "h:1", "access_key": "", "secret_key": ""}
    [tier] = parse(native({"type": "obj", **connection})).tiers
    assert tier.config.storage_options == {"endpoint_url": "http://h:1"}
    assert parse(native({"type": "obj", "bucket": "b"})).tiers[0].config.storage_options == {}


def test_endpoint_may_have_a_scheme_of_its_own() -> None:
    [tier] = parse(native({"type": "obj", "bucket": "b", "endpoint_override": "https://h"})).tiers
    assert tier.config.storage_options == {"endpoint_url": "https://h"}


def test_names_count_tiers_of_one_type() -> None:
    config = parse(native(FS, {**FS, "root_dir": "/b"}, {"type": "obj", **OBJ}, {**FS, "root_dir": "/c"}))
    assert [tier.name for tier in config.tiers] == ["fs", "fs-2", "obj", "fs-3"]


def test_tier_of_ours_among_vllms() -> None:
    entry = {
        "type": "KVStoreTier",
        "module_path": "kvstore_vllm",
        "url": "s3://b/kv?timeout=2s",
        "name": "cold",
    }
    [tier] = parse(native(entry)).tiers
    assert (tier.name, tier.config.timeout) == ("cold", 2.0)
    assert secondary_tier(entry) == tier


def test_events_and_locality() -> None:
    says = {"enable_kv_events": True, "locality": "REMOTE"}
    config = parse(native({**FS, **says}, {"type": "KVStoreTier", "url": "/b", **says}))
    config_of_ours = parse({"tiers": [HOST, {"url": "/b", **says}, "/c"]})
    for tier in (*config.tiers, config_of_ours.tiers[0]):
        assert (tier.enable_kv_events, tier.locality) == (True, "REMOTE")
    assert (config_of_ours.tiers[1].enable_kv_events, config_of_ours.tiers[1].locality) == (False, None)


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ("/mnt/kv", "secondary_tiers[0]: a tier is a mapping"),
        ({"root_dir": "/x"}, "not a type of tier that kvstore_vllm serves: None; valid: fs, obj, p2p"),
        ({"type": "f"}, "'f'; did you mean 'fs'"),
        ({"type": "kvcr"}, "'kvcr'"),
        ({"type": ["fs"]}, "['fs']"),
        ({"type": "fs"}, "secondary_tiers[0] (fs): 'root_dir' is missing"),
        ({"type": "fs", "rootdir": "/x"}, "did you mean 'root_dir'"),
        ({**FS, "n_read_threads": 0}, "n_read_threads: not a whole number"),
        ({**FS, "locality": "remote"}, "locality: not a choice"),
        ({"type": "obj"}, "secondary_tiers[0] (obj): 'bucket' is missing"),
        ({"type": "obj", "store_config": {"bukcet": "b"}}, "did you mean 'bucket'"),
        ({"type": "obj", "bucket": "b", "store_config": {"bucket": "b"}}, "'bucket' is given twice"),
        ({"type": "obj", "store_config": "b"}, "store_config: not a mapping"),
        ({"type": "obj", "bucket": "b", "access_key": "a"}, "give both or neither"),
        ({"type": "KVStoreTier"}, "a mapping with one under 'url'"),
        ({"type": "KVStoreTier", "url": HOST}, "not ram://"),
        ({"type": "KVStoreTier", "url": "/x", "capcity": 1}, "did you mean 'capacity'"),
    ],
)
def test_wrong_tiers(tier: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(native(tier))


def test_host_tier_takes_no_keys_of_events() -> None:
    with pytest.raises(ConfigError, match="'locality' is a key of secondary tiers"):
        parse({"tiers": [{"url": HOST, "locality": "LOCAL"}]})


def test_unknown_keys_and_backpressure_of_a_tier_are_warnings() -> None:
    [unknown] = parse(native({**FS, "stripe": 1})).warnings
    assert unknown == "secondary_tiers[0] (fs): unknown key 'stripe' is ignored"
    for entry in (FS, {"type": "KVStoreTier", "url": "/b"}):
        [useless] = parse(native({**entry, "backpressure": {"backpressure_cls": "E"}})).warnings
        assert "no effect" in useless


@pytest.mark.parametrize("wrong", [{"secret_key": [SECRET]}, {"secret_keyy": SECRET}, {"access_key": None}])
def test_secrets_are_in_no_message(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(native({"type": "obj", **OBJ, **wrong}))
    assert SECRET not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    assert SECRET not in repr(parse(native({"type": "obj", **OBJ})))


# Peers


def served(config: AdapterConfig, replica: int = 0) -> str | None:
    return config.store_options(4096, {}, replica=replica).host.serve


def test_p2p_is_where_the_host_tier_is_served() -> None:
    secret = {"token": SECRET * 3}
    config = parse(native({"type": "p2p", "host": "10.0.0.1", "port": 6000, "storage_options": secret}, FS))
    assert config.host.storage_options == secret
    assert SECRET not in repr(config)
    assert [served(config, replica) for replica in (0, 2)] == ["tcp://10.0.0.1:6000", "tcp://10.0.0.1:6002"]
    assert [tier.name for tier in config.tiers] == ["fs"]
    assert config.warnings == ()


def test_p2p_has_the_defaults_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(parse(native({"type": "p2p"}))) == "tcp://localhost:5710"
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "::1")
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_PORT", "7000")
    assert served(parse(native({"type": "p2p"}))) == "tcp://[::1]:7000"


@pytest.mark.parametrize(
    ("name", "value"),
    [("backends", ["UCX"]), ("num_threads", 4), ("unbound_store_timeout_s", 60), ("locality", "REMOTE")],
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
