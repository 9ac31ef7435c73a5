"""Two stores of which one reads the other's memory over NIXL, and what becomes of it where NIXL is not."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from mmap import mmap
from pathlib import Path

import pytest

import kvstore
from kvstore import BackendError, ConfigError
from kvstore.address import Address
from kvstore.backends import create
from kvstore.config import TierConfig
from kvstore.peer import choice, nixl_agent, nixl_reader
from kvstore.peer.credentials import ClientCredentials, ServerCredentials
from support.peers import CHUNK, evict, gate_of, needs_nixl, no_leases, peer_of, reader, server
from support.processes import has_ended, wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

DATA = {bytes([number]) * 16: os.urandom(CHUNK - 100 * number) for number in range(1, 17)}
KEYS = list(DATA)


@pytest.fixture
def owner() -> Iterator[kvstore.Store]:
    """A store that serves `DATA` over NIXL only."""
    with server(transport="nixl") as store:
        store.put_many(DATA)
        yield store


def ways(store: kvstore.Store) -> dict[str, float]:
    """How many chunks came by which transport."""
    custom = store.stats().tier("peer").custom
    return {name: custom[f"peer_{name}"] for name in ("zmq", "stream", "nixl") if f"peer_{name}" in custom}


# What works.


@needs_nixl
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_chunks_are_read_one_sided(owner: kvstore.Store, engine: str) -> None:
    with reader(peer_of(owner), transport="nixl", engine=engine) as store:
        absent = bytes([99]) * 16
        assert store.get_many([*KEYS, absent]) == DATA
        wait_for(lambda: ways(store) == {"nixl": len(DATA)})
    no_leases(owner)


@needs_nixl
def test_empty_and_whole_chunks_are_read_one_sided(owner: kvstore.Store) -> None:
    data = {b"e" * 16: b"", b"w" * 16: os.urandom(CHUNK), b"o" * 16: b"o"}
    owner.put_many(data)
    with reader(peer_of(owner), transport="nixl") as store:
        assert store.get_many(list(data)) == data


@needs_nixl
def test_more_than_a_peer_may_hold_is_read_one_sided() -> None:
    with (
        server(slots=256, transport="nixl") as owner,
        reader(peer_of(owner), "&concurrency=256", slots=256, transport="nixl") as store,
    ):
        data = {number.to_bytes(16): number.to_bytes(2) * 300 for number in range(200)}
        owner.put_many(data)
        assert store.get_many(list(data)) == data
        no_leases(owner)


@needs_nixl
def test_read_one_sided_while_it_is_deleted_and_stored_anew(owner: kvstore.Store) -> None:
    """Whatever arrives is one version or another, whole: the lease keeps the slot while it is read."""
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number = (number + 1) % 256
            owner.delete(KEYS)
            owner.put_many({key: bytes([number]) * CHUNK for key in KEYS})

    changer = threading.Thread(target=change)
    backend = create(TierConfig(url=peer_of(owner), transport="nixl"), owner.namespace)
    out = memoryview(mmap(-1, CHUNK))
    with closing(backend):
        backend.open()
        changer.start()
        try:
            seen = set()
            while len(seen) < 50:
                for key in KEYS:
                    if (size := backend.read_into(key, out)) is not None and out[:size] != DATA[key]:
                        assert out == out[:1].tobytes() * CHUNK
                        seen.add(out[0])
        finally:
            stop.set()
            changer.join()
    no_leases(owner)


@needs_nixl
def test_auto_is_nixl_where_both_have_it() -> None:
    with server(transport="auto") as owner, reader(peer_of(owner), transport="auto") as store:
        owner.put_many(DATA)
        assert store.get_many(KEYS) == DATA
        assert ways(store) == {"nixl": len(DATA)}


# Who may.


@needs_nixl
@pytest.mark.parametrize(
    ("serves", "reads", "detail"),
    [
        ("zmq", "nixl", "found ['nixl'], expected one of ['stream', 'zmq']"),
        ("nixl", "zmq", "found ['stream', 'zmq'], expected one of ['nixl']"),
    ],
    ids=["reader wants NIXL", "server wants NIXL"],
)
def test_transports_that_do_not_match_are_refused(serves: str, reads: str, detail: str) -> None:
    with (
        server(transport=serves) as owner,
        pytest.raises(ConfigError, match=re.escape(f"transport: {detail}")),
    ):
        reader(peer_of(owner), transport=reads)


@needs_nixl
def test_memory_is_not_offered_unasked_to_strangers() -> None:
    everywhere = "tcp://0.0.0.0:0"

    def read(owner: kvstore.Store, options: dict[str, str]) -> dict[str, float]:
        url = peer_of(owner).replace("0.0.0.0", "127.0.0.1")
        with reader(url, transport="auto", options=options) as store:
            owner.put(KEYS[0], b"x")
            assert store.get(KEYS[0]) == b"x"
            return ways(store)

    with server(serve=everywhere, transport="auto") as owner:
        assert read(owner, {}) == {"stream": 1}
    with server(serve=everywhere, transport="nixl") as owner:
        assert read(owner, {}) == {"nixl": 1}
    secret = {"token": "a token that both know"}
    with server(serve=everywhere, transport="auto", storage_options={"host": secret}) as owner:
        assert read(owner, secret) == {"nixl": 1}


def listening(pid: int) -> set[str]:
    """The addresses at which a process waits for connections, in hexadecimal as the kernel has them."""
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed just now
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


LOOPBACK = "0100007F"


@needs_nixl
@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_for_this_machine_alone_nobody_listens_on_a_network(transport: str) -> None:
    before = listening(os.getpid())
    with (
        server(transport=transport) as owner,
        reader(peer_of(owner), transport=transport) as store,
    ):
        owner.put_many(DATA)
        assert store.get_many(KEYS) == DATA
        assert ways(store) == {"nixl": len(DATA)}
        [pid] = gate_of(owner).pids
        assert listening(pid) == {LOOPBACK}
        assert listening(os.getpid()) - before <= {LOOPBACK}


@needs_nixl
@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_nobody_listens_before_a_peer_is_named(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(nixl_reader, "Agent", lambda **options: made.append(options))
    tier = TierConfig(url="peer://", transport=transport)
    with closing(create(tier, kvstore.Namespace({}, CHUNK))) as backend:
        backend.open()
    assert made == []


@pytest.mark.parametrize(
    ("address", "options", "comes_to"),
    [
        ("127.0.0.1:1", {}, "auto"),
        ("127.evil.com:1", {}, "zmq"),
        ("10.0.0.1:1", {}, "zmq"),
        ("10.0.0.1:1", {"token": "a token that both know"}, "auto"),
        ("", {}, "zmq"),
    ],
)
def test_nobody_reads_memory_unasked_who_proves_nothing(
    address: str, options: dict[str, str], comes_to: str
) -> None:
    where = Address.parse(address) if address else None
    assert choice.settle("auto", ClientCredentials.of(options, ""), where) == comes_to
    assert choice.settle("auto", ServerCredentials.of(options, ""), where) == comes_to
    assert choice.settle("nixl", ClientCredentials.of(options, ""), where) == "nixl"


@needs_nixl
def test_what_the_libraries_print_is_the_callers_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of ours are quiet, unless the caller says otherwise."""
    monkeypatch.delenv("NIXL_LOG_LEVEL", raising=False)
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")
    nixl_agent._load.cache_clear()
    with server(transport="nixl") as owner, reader(peer_of(owner), transport="nixl") as store:
        assert store.get(KEYS[0]) is None
        [pid] = gate_of(owner).pids
        told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {b"NIXL_LOG_LEVEL=FATAL", b"UCX_LOG_LEVEL=error"} <= set(told)
    assert "NIXL_LOG_LEVEL" not in os.environ


# Where it is not there.


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL has another name than any that is installed."""
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_of_another_kind",))
    choice._say_once.cache_clear()


def refused(open_store: Callable[[], kvstore.Store]) -> str:
    with pytest.raises(ConfigError, match=r"pip install '\.\[nixl\]'") as caught:
        open_store()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_package_nixl_is_refused_with_the_remedy(uninstalled: None) -> None:
    assert "tier 'host'" in refused(lambda: server(transport="nixl"))
    peer = "peer://127.0.0.1:9"
    for engine in ("threads", "processes"):
        message = refused(lambda: reader(peer, "&required=false", transport="nixl", engine=engine))  # noqa: B023
        assert "tier 'peer'" in message


def test_without_the_package_auto_says_so_once(uninstalled: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvstore"):
        with server(transport="auto") as owner, reader(peer_of(owner), transport="auto") as store:
            owner.put_many(DATA)
            assert store.get_many(KEYS) == DATA
            assert ways(store) == {"stream": len(DATA)}
        with server(transport="auto"):
            pass
    [warning] = caplog.records
    assert "NIXL is not installed" in warning.getMessage()


def test_without_the_package_nothing_is_said_where_it_would_not_be_used(
    uninstalled: None, caplog: pytest.LogCaptureFixture
) -> None:
    """On a network, where nobody proves anything."""
    with (
        caplog.at_level(logging.WARNING, "kvstore"),
        server(serve="tcp://0.0.0.0:0", transport="auto"),
        reader("peer://192.0.2.9:9", "&required=false&timeout=100ms", transport="auto"),
    ):
        pass
    assert not [record for record in caplog.records if "NIXL" in record.getMessage()]


@needs_nixl
def test_where_nixl_does_not_work_it_is_refused_or_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX may use nothing that leads to another process."""
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(BackendError, match="NIXL does not work here"):
        server(transport="nixl")
    with server(transport="auto") as owner:
        monkeypatch.delenv("UCX_TLS")
        owner.put_many(DATA)
        with reader(peer_of(owner), transport="auto") as store:
            assert store.get_many(KEYS) == DATA
            assert ways(store) == {"stream": len(DATA)}


# What can go wrong.


def comes(owner: kvstore.Store, store: kvstore.Store) -> bool:
    """Whether a chunk that nobody has asked for yet comes over."""
    key = os.urandom(16)
    owner.put(key, key)
    return store.get(key, timeout=5) == key


@needs_nixl
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_the_server_is_killed_while_its_memory_is_read(engine: str) -> None:
    """Whatever came is right, the rest is missing; the next one is read one-sided again."""
    chunk = 4 << 20
    data = {bytes([number]) * 16: bytes([number]) * chunk for number in range(1, 33)}
    slots = 40 * chunk // CHUNK
    with (
        server(slots, transport="nixl", chunk_size=chunk) as owner,
        reader(
            peer_of(owner), "&timeout=3s", slots=slots, transport="nixl", chunk_size=chunk, engine=engine
        ) as store,
    ):
        owner.put_many(data)
        for _ in range(3):
            [pid] = gate_of(owner).pids
            job = store.prefetch(list(data))
            wait_for(lambda: gate_of(owner).leases > 0 or job.done())  # noqa: B023
            os.kill(pid, signal.SIGKILL)
            job.result(timeout=30)
            found = store.get_many(list(data), timeout=0)
            assert found == {key: data[key] for key in found}
            assert has_ended(pid, 5)
            wait_for(lambda: owner.stats() and gate_of(owner).pids not in ([], [pid]))  # noqa: B023
            wait_for(lambda: comes(owner, store))
            evict(store)
        assert set(ways(store)) == {"nixl"}
