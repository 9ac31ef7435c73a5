"""Configuration of the vLLM adapter: the tiers of vLLM's own tiering, taken as they stand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from adapter_forms import FS, HOST, OBJ, SECRET, native

from kvstore.config import TierConfig
from kvstore.errors import ConfigError
from kvstore_vllm.config import AdapterTier, parse, secondary_tier


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
