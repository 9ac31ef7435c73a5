"""Every configuration survives its URLs, its dict, its TOML, and the way to another process."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import OPTIONS, SETTINGS, HostConfig, StoreConfig, TierConfig, parse

SIZES = st.integers(2**21 + 4096, 2**60)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0?"), max_size=12)
LOCATIONS = st.one_of(
    PATHS.map(lambda path: f"/mnt/{path}").filter(lambda path: "::" not in path),
    st.sampled_from(
        [
            "s3://bucket/kv",
            "memory://name",
            "memory://",
            "peer://",
            "peer://10.0.0.1:5710",
            "peer://[::1]:5710",
            "sftp://bob@host:22/kv",
            "simplecache::s3://bucket/kv",
            "zip://inner::file:///mnt/kv.zip",
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/kv",
        ]
    ),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "name": NAMES,
    "capacity": SIZES,
    "policy": st.sampled_from(["lru", "arc", "priority"]),
    "pin": st.sampled_from(["auto", "on", "off"]),
    "serve": st.sampled_from(["tcp://127.0.0.1:5710", "tcp://0.0.0.0:1", "tcp://[::1]:0"]),
    "write": st.sampled_from(["through", "on-evict", "off"]),
    "read": st.booleans(),
    "timeout": st.floats(0, 1e9, exclude_min=True),
    "retries": st.integers(0, 100),
    "workers": st.integers(1, 1024),
    "concurrency": st.integers(1, 4096),
    "required": st.booleans(),
    "min_free": SIZES,
    "ttl": st.floats(0, 1e9, exclude_min=True),
    "total": SIZES,
    "durability": st.sampled_from(["none", "data", "full"]),
    "direct": st.sampled_from(["auto", "on", "off"]),
    "transport": st.sampled_from(["auto", "zmq", "nixl"]),
    "mode": st.integers(0, 0o177).map(lambda bits: bits | 0o600),
    "peers": st.integers(1, 64),
    "allow": st.lists(
        st.sampled_from(["loopback", "any", "10.0.0.0/16", "*.svc", "::1/128"]), min_size=1
    ).map(tuple),
}
#: Options of ``peer://`` without an address only.
OF_PLACES = {"peers", "allow"}
ARGUMENTS = st.dictionaries(
    NAMES, st.booleans() | st.integers(0, 99) | NAMES | st.lists(NAMES, max_size=2), max_size=2
)


def options_for(scheme: str) -> dict[str, st.SearchStrategy[Any]]:
    return {name: values for name, values in VALUES.items() if OPTIONS[name].applies_to(scheme)}


@st.composite
def hosts(draw: st.DrawFn) -> HostConfig:
    optional = {name: values for name, values in options_for("ram").items() if name != "capacity"}
    return HostConfig(capacity=draw(SIZES), **draw(st.fixed_dictionaries({}, optional=optional)))


@st.composite
def tiers(draw: st.DrawFn, arguments: bool = False) -> TierConfig:
    bare = TierConfig(url=draw(LOCATIONS))
    optional = options_for(bare.scheme)
    if not bare.dials:
        optional = {name: values for name, values in optional.items() if name not in OF_PLACES}
    options = draw(st.fixed_dictionaries({}, optional=optional))
    return TierConfig(url=bare.url, **options, storage_options=draw(ARGUMENTS) if arguments else {})


@st.composite
def stores(draw: st.DrawFn, arguments: bool = False) -> StoreConfig:
    host = draw(hosts())
    several = draw(st.lists(tiers(arguments), max_size=4, unique_by=lambda tier: tier.name or object()))
    return StoreConfig(
        host=host,
        tiers=tuple(tier for tier in several if tier.name != host.name),
        namespace=draw(
            st.dictionaries(st.text(max_size=3), st.booleans() | st.integers(-9, 9) | NAMES, max_size=3)
        ),
        chunk_size=draw(st.integers(1, 2**21)),
        engine=draw(st.sampled_from(["threads", "processes", "inline"])),
        nice=draw(st.none() | st.integers(-20, 19)),
        affinity=draw(st.none() | st.lists(st.integers(0, 9), min_size=1).map(tuple)),
    )


def shared(config: StoreConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("namespace", *SETTINGS)}


def test_the_strategies_cover_every_option() -> None:
    assert VALUES.keys() == {option.name for option in OPTIONS.values() if option.available}


@given(stores())
def test_urls_lead_back(config: StoreConfig) -> None:
    urls = [config.host.to_url(), *(tier.to_url() for tier in config.tiers)]
    assert parse(*urls, **shared(config)) == config


@given(stores(arguments=True))
def test_dicts_and_toml_lead_back(config: StoreConfig) -> None:
    assert StoreConfig.from_dict(config.to_dict()) == config
    assert StoreConfig.from_toml(config.to_toml()) == config
    assert parse(config.host, *(tier.to_dict() for tier in config.tiers), **shared(config)) == config


@given(stores(arguments=True))
def test_structures_survive_transport(config: StoreConfig) -> None:
    assert pickle.loads(pickle.dumps(config)) == config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=StoreConfig) == config


def test_the_documented_urls_are_in_normal_form() -> None:
    urls = [
        "ram://?capacity=64GiB&policy=arc",
        "file:///mnt/nvme/kv?capacity=2TiB&workers=4&durability=data&mode=0640",
        "s3://bucket/prefix?write=on-evict&timeout=500ms&concurrency=8&required=false",
        "memory://name?read=off",
        "peer://10.0.0.1:5710?name=other",
    ]
    config = parse(*urls)
    assert [config.host.to_url(), *(tier.to_url() for tier in config.tiers)] == urls


def test_the_table_describes_every_option() -> None:
    for option in (*OPTIONS.values(), *SETTINGS.values()):
        if option.available:
            assert option.help.endswith(".")
            value = option.parse(option.example, "table")
            assert option.parse(option.format(value), "table") == value
            assert option.parse(option.plain(value), "table") == value
