"""Configuration: what is written is what is meant, and what is wrong is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.pretty import pretty_repr

from kvstore.config import OPTIONS, HostConfig, StoreConfig, TierConfig, parse
from kvstore.config.store import check_places
from kvstore.errors import ConfigError

HOST = "ram://?capacity=64GiB"
SECRET = "hunter2"


def test_a_path_is_a_directory_whatever_its_name(tmp_path: Path) -> None:
    odd = tmp_path / "50% off?"
    assert parse(HOST, odd).tiers[0].path == str(odd)
    assert Path(parse(HOST, Path("here")).tiers[0].path) == Path.cwd() / "here"


def test_defaults() -> None:
    config = parse(HOST, "/mnt/kv")
    assert config.host == HostConfig(name="host", capacity=64 * 2**30, policy="lru", pin="auto")
    expected = TierConfig(
        url="file:///mnt/kv", name="file", capacity=None, write="through", read=True, timeout=10.0, retries=2,
        workers=2, concurrency=16, durability="none", direct="auto", mode=0o600, required=True,
        storage_options={},
    )  # fmt: skip
    assert config.tiers == (expected,)
    assert (config.chunk_size, config.engine, config.nice, config.affinity) == (
        2 * 2**20,
        "threads",
        None,
        None,
    )
    assert (
        parse("ram://?capacity=64GiB&pin=auto", {"url": "file:///mnt/kv", "read": True, "mode": 0o600})
        == config
    )


# Locations and names


@pytest.mark.parametrize(
    ("given", "url", "path"),
    [
        ("/mnt/x", "file:///mnt/x", "/mnt/x"),
        ("file:///mnt/x/", "file:///mnt/x", "/mnt/x"),
        ("file://localhost/mnt/x", "file:///mnt/x", "/mnt/x"),
        ("FILE:///mnt//a/../x", "file:///mnt/x", "/mnt/x"),
        ("/mnt/100% full#1", "file:///mnt/100%25%20full%231", "/mnt/100% full#1"),
        ("file:///mnt/a%20b", "file:///mnt/a%20b", "/mnt/a b"),
        ("kv", "file:///here/kv", "/here/kv"),
        ("../kv", "file:///kv", "/kv"),
        ("file://./kv", "file:///here/kv", "/here/kv"),
        ("~/kv", "file:///home/kv", "/home/kv"),
        ("~nobody-here/kv", "file:///here/~nobody-here/kv", "/here/~nobody-here/kv"),
        ("S3://Bucket/kv/", "s3://Bucket/kv", "Bucket/kv"),
        ("simplecache::s3://b/kv", "simplecache::s3://b/kv", "b/kv"),
    ],
)
def test_locations(given: str, url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    monkeypatch.setenv("HOME", "/home")
    tier = parse(HOST, given).tiers[0]
    assert (tier.url, tier.path) == (url, path)
    assert TierConfig(url=tier.url) == TierConfig(url=given)


def test_schemes() -> None:
    urls = [
        "/x",
        "s3://b",
        "memory://m",
        "peer://h:1",
        "simplecache::s3://b",
        "sftp://bob@h/x",
        "peer://[::1]:1",
    ]
    schemes = [tier.scheme for tier in parse(HOST, *urls).tiers]
    assert schemes == ["file", "s3", "memory", "peer", "simplecache", "sftp", "peer"]


def test_default_names_count_and_give_way_to_given_ones() -> None:
    config = parse(HOST, "/a", "s3://b", "/c", "/d?name=file-2", "s3://e?name=s3", "git+x://f")
    assert [tier.name for tier in config.tiers] == ["file", "s3-2", "file-3", "file-2", "s3", "git-x"]


def test_the_query_of_a_chained_url_belongs_to_its_last_component() -> None:
    tier = parse(HOST, "simplecache::s3://bucket/kv?write=off&name=c").tiers[0]
    assert (tier.url, tier.write, tier.name) == ("simplecache::s3://bucket/kv", "off", "c")
    assert parse(HOST, {"url": "simplecache::s3://bucket/kv", "write": "off", "name": "c"}).tiers[0] == tier


# What is refused


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], "no tiers.*KVSTORE_CONFIG"),
        (["/x"], r"no host tier; put one first, such as ram://\?capacity=64GiB"),
        ([HOST, "/x", HOST], "2 host tiers"),
        (["/x", HOST], "comes first, not at place 2"),
        (["ram://"], "the host tier needs a capacity"),
        (["ram://x?capacity=1GiB"], "has no path"),
        ([{"url": HOST, "storage_options": {"a": 1}}], "host tier has no storage_options"),
        ([HOST, "/x?capcity=1GiB"], "tier 'file:///x': unknown option 'capcity'; did you mean 'capacity'"),
        (
            [HOST, {"url": "s3://b", "name": "cold", "timout": 1}],
            "tier 'cold': unknown option 'timout'.*'timeout'",
        ),
        ([HOST, "/x?zzz=1"], "unknown option 'zzz'; valid: capacity, concurrency, direct"),
        ([HOST, "/x?policy=arc"], r"'policy' is an option of the host tier \(ram://\), not of file://"),
        ([HOST, "s3://b?direct=auto"], "tier 's3://b': 'direct' is an option of file:// tiers, not of s3://"),
        (["ram://?capacity=1GiB&write=off"], "'write' is an option of secondary tiers, not of ram://"),
        (
            [HOST, "/x?capacity=lots"],
            "tier 'file:///x': capacity: not a size: 'lots'.*example: capacity=64GiB",
        ),
        ([HOST, "/x?timeout=soon&name=n"], "tier 'n': timeout: not a duration: 'soon'.*example: timeout=2s"),
        ([HOST, "/x?timeout=0s"], "timeout: a timeout is more than zero"),
        ([HOST, "/x?write=thrugh"], "write: not a choice: 'thrugh'; did you mean 'through'"),
        ([HOST, {"url": "/x", "write": 3}], "write: not a choice: 3; valid: through, on-evict, off"),
        ([HOST, "/x?read=maybe"], "read: neither on nor off: 'maybe'"),
        ([HOST, "/x?workers=0"], "workers: not a whole number from 1 to 1024: 0"),
        ([HOST, {"url": "/x", "retries": True}], "retries: not a whole number from 0 to 100: True"),
        ([HOST, "/x?mode=0680"], "mode: not a file mode: '0680'"),
        ([HOST, {"url": "/x", "mode": 600}], "mode: not a file mode: 600"),
        ([HOST, "/x?mode=0440"], "owner must be able to read and write: 0440"),
        ([HOST, "/x?name=a.b"], "name: not a name: 'a.b'"),
        ([HOST, "/x?workers=1&workers=1"], "'workers' is given twice"),
        ([HOST, {"url": "/x?workers=1", "workers": 1}], "'workers' is given twice, in the URL and beside it"),
        ([HOST, "/x?workers="], "'workers' has no value"),
        ([HOST, "/x?workers"], "'workers' has no value"),
        ([HOST, "simplecache?a=1::s3://b"], "options follow the last component"),
        ([HOST, "/a?name=x", "/b?name=x"], "tier 'x': this name is given to two tiers"),
        ([HOST, "/a?name=host"], "tier 'host': this name is given to two tiers"),
        ([HOST, "s3:/b"], "not a URL; write s3://"),
        ([HOST, "file://mnt/x"], "write file:///mnt/x for an absolute path"),
        ([HOST, "file:kv"], "not a URL; write file://... or, for a local path, ./file:kv"),
        ([HOST, "file://"], "no path; write one such as file:///mnt/kv"),
        ([HOST, "file://mnt:80/x"], "a file URL has no host"),
        ([HOST, "file://bob@mnt/x"], "a file URL has no host"),
        ([HOST, "file:///x#part"], "no fragment; write %23"),
        ([HOST, "file:///100%"], "write %25"),
        ([HOST, "file:///x%zz"], "write %25"),
        ([HOST, "file:///x%00"], "NUL"),
        ([HOST, "/x\0"], "NUL"),
        ([HOST, "s3//bucket/kv"], "not a URL; write s3://"),
        ([HOST, " /x"], "white space around"),
        ([HOST, "file:///x "], "white space around"),
        ([HOST, "s3://bucket\n"], "white space around"),
        ([HOST, "s3://bucket\t/kv"], "a control character"),
        ([HOST, "simplecache::"], "a component of the chained URL is empty"),
        ([HOST, "::s3://bucket"], "a component of the chained URL is empty"),
        ([HOST, "s3://"], "no bucket; write s3://bucket/prefix"),
        ([HOST, "s3:///kv"], "no bucket; write s3://bucket/prefix"),
        ([HOST, "1s://x"], "not a URL scheme: '1s'"),
        ([HOST, ""], "a tier without a URL"),
        ([HOST, "  "], "a tier without a URL"),
        ([HOST, {"path": "/x"}], "under 'url'"),
        ([HOST, {"url": "/x", 3: 4}], "a URL or a mapping of options, not dict"),
        ([HOST, 5], "a URL or a mapping of options, not int"),
        ([HOST, {"url": "s3://b", "storage_options": {3: 4}}], "storage_options is a mapping from names"),
        (["ram://?capacity=1MiB"], "tier 'host': capacity=1MiB is below one chunk, which takes 2MiB"),
        ([HOST, "/x?capacity=1KB"], "tier 'file': capacity=1KB is below one chunk"),
    ],
)
def test_refusals_are_one_line_that_says_what_to_do(tiers: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(*tiers)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [option.name for option in OPTIONS.values() if not option.available])
def test_options_of_later_work_are_refused_by_name(name: str) -> None:
    for url in (f"{HOST}&{name}=1", f"/x?{name}=1", f"peer://h:1?{name}=1"):
        with pytest.raises(ConfigError, match=f"'{name}' is not available yet"):
            parse(HOST, url)


@pytest.mark.parametrize(
    "tier",
    [
        f"s3://AKIA:{SECRET}@bucket/kv",
        f"s3://{SECRET}@bucket/kv",
        f"gs://{SECRET}@bucket",
        f"s3://AKIA:12/{SECRET}@bucket/kv",
        f"sftp://bob:{SECRET}@host/kv",
        f"sftp://bob:a/{SECRET}@host/kv",
        f"sftp://bob:a?{SECRET}@host/kv",
        f"sftp://bob:1::{SECRET}@host/kv",
        f"simplecache::sftp://bob:{SECRET}@host/kv",
        f"bob:{SECRET}@host/kv",
        f"s3://bucket?secret={SECRET}",
        f"s3://bucket?AWS_ACCESS_KEY_ID={SECRET}",
        f"s3://bucket?token={SECRET}&write=off",
        f"simplecache?key={SECRET}::s3://bucket",
        {"url": "s3://bucket", "password": SECRET},
        {"url": f"s3://AKIA:{SECRET}@bucket", "name": "cold"},
    ],
)
def test_credentials_are_refused_and_not_repeated(tier: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(HOST, tier)
    assert SECRET not in str(caught.value)
    if "options follow" not in str(caught.value):
        assert "storage_options" in str(caught.value)
        assert "environment" in str(caught.value)


def test_structures_check_what_they_are_given() -> None:
    assert TierConfig(url="/x", capacity="2TiB", read="off") == TierConfig(
        url="/x", capacity=2**41, read=False
    )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'mode' is an option of file:// tiers"):
        TierConfig(url="s3://b", mode=0o640)
    with pytest.raises(ConfigError, match="options are fields of their own") as caught:
        TierConfig(url=f"s3://b?secret={SECRET}")
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="host tier is a HostConfig"):
        TierConfig(url="ram://")
    with pytest.raises(AttributeError):
        TierConfig(url="/x").read = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": "big"}, "store: chunk_size: not a size: 'big'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1 byte"),
        ({"engine": "thread"}, "store: engine: not a choice: 'thread'; did you mean 'threads'"),
        ({"nice": 40}, "store: nice: not a whole number from -20 to 19: 40"),
        ({"affinity": []}, "store: affinity: not a list of CPU numbers"),
        ({"affinity": [-1]}, "store: affinity: not a whole number from 0"),
        ({"namespace": {"a": {1, 2}}}, "namespace.a.* is set"),
        ({"chunksize": "1MiB"}, "store: unknown setting 'chunksize'; did you mean 'chunk_size'"),
        (
            {"capacity": "1GiB"},
            r"store: 'capacity' is an option of tiers; write it into the URL .* \?capacity=",
        ),
        ({"storage_options": {"fil": {}}}, "there is no tier 'fil'.*did you mean 'file'"),
        ({"storage_options": {"host": {}}}, "there is no tier 'host' that takes them"),
        ({"storage_options": {"file": 3}}, "tier 'file': storage_options is a mapping"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(HOST, "/x", **settings)


def test_one_bucket_is_one_place_unless_two_servers_have_it() -> None:
    tiers = ["s3://bucket/kv?name=near", "peer://", "S3://bucket/kv/?name=far&write=off", "peer://"]
    with pytest.raises(
        ConfigError, match="tiers 'near' and 'far' are the same place, s3://bucket/kv; keep one"
    ):
        check_places(parse(HOST, *tiers))
    servers = {name: {"endpoint_url": f"http://{name}"} for name in ("near", "far")}
    check_places(parse(HOST, *tiers, storage_options=servers))


def test_a_host_chunk_takes_whole_pages() -> None:
    with pytest.raises(ConfigError, match="below one chunk, which takes 4KiB"):
        parse("ram://?capacity=1000", chunk_size=1000)
    assert parse("ram://?capacity=4096", chunk_size=1000).host.capacity == 4096


@pytest.mark.parametrize("url", ["/x", "memory://x", "s3://bucket"])
def test_on_storage_a_chunk_has_a_header_and_takes_whole_pages(url: str) -> None:
    with pytest.raises(ConfigError, match="capacity=8191B is below one chunk, which takes 8KiB there"):
        parse("ram://?capacity=4096", f"{url}?capacity=8191", chunk_size=1000)
    assert parse("ram://?capacity=4096", f"{url}?capacity=8192", chunk_size=1000).tiers[0].capacity == 8192


# Secrets


def test_storage_options_are_kept_and_never_shown() -> None:
    config = parse(
        HOST,
        {"url": "s3://b", "storage_options": {"key": "a", "secret": "old"}},
        storage_options={"s3": {"secret": SECRET}},
    )
    assert config.tiers[0].storage_options == {"key": "a", "secret": SECRET}
    assert config.to_dict()["tiers"][1]["storage_options"] == {"key": "a", "secret": SECRET}
    for shown in (repr(config), str(config.tiers[0]), pretty_repr(config)):
        assert "hidden" in shown
        assert SECRET not in shown
    with pytest.raises(ConfigError, match="storage_options cannot be in a URL") as caught:
        config.tiers[0].to_url()
    assert SECRET not in str(caught.value)


# Files


FILE = """
chunk_size = "1MiB"
engine = "inline"
tiers = ["ram://?capacity=1GiB", {url = "/mnt/kv", capacity = "2TiB", timeout = 3}]

[namespace]
model = "m"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_read_and_arguments_win(file: Path) -> None:
    config = parse(config=file)
    assert (config.chunk_size, config.engine, config.namespace) == (2**20, "inline", {"model": "m"})
    assert (config.tiers[0].capacity, config.tiers[0].timeout) == (2**41, 3.0)
    mixed = parse(HOST, namespace={}, engine="threads", config=str(file))
    assert mixed == parse(HOST, chunk_size="1MiB")


def test_the_environment_names_a_file_for_those_who_give_none(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_CONFIG", str(file))
    assert parse() == parse(config=file)
    assert parse(chunk_size="2MiB").chunk_size == 2**21
    assert parse(HOST) == StoreConfig(host=HostConfig(capacity=2**36))


def test_bad_files_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CONFIG", str(file.with_name("absent.toml")))
    with pytest.raises(ConfigError, match=r"absent\.toml.*No such file"):
        parse()
    for content, message in [
        (b"tiers = [", "kvstore.toml.*not TOML"),
        (b"\xff", "kvstore.toml.*utf-8"),
        (b"tiers = 3", "tiers is a list of URLs or mappings, not int"),
        (b"chunksize = 3", "store: unknown setting 'chunksize'; did you mean 'chunk_size'"),
        (b"workers = 3", "store: 'workers' is an option of tiers"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            parse(config=file)


@pytest.mark.parametrize("value", [None, {"deep": [1, None]}, [b"x"]])
def test_what_toml_cannot_hold_is_refused_by_name(value: Any) -> None:
    config = parse(HOST, {"url": "s3://b", "storage_options": {"option": value}})
    with pytest.raises(ConfigError, match=r"tier 's3': storage_options\.option.*which TOML cannot hold"):
        config.to_toml()
    assert StoreConfig.from_dict(config.to_dict()) == config
