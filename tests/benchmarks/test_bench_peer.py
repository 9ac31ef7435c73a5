"""Peers over the loopback interface, against a bare transfer by the same transport in the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from _paired import ROUNDS, Side, compare
from pytest_benchmark.fixture import BenchmarkFixture

import kvstore
from kvstore.backends import Backend, create
from kvstore.config import TierConfig
from support.peers import evict, gate_of, needs_nixl, peer_of, reader, server

zmq = pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

CHUNK = 2 << 20
CHUNKS = 128
_SENDER = f"""
import mmap, sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.sndbuf = 4 << 20
socket.connect(sys.argv[1])
region = memoryview(mmap.mmap(-1, {CHUNKS * CHUNK}))
for start in range(0, len(region), 4096):
    region[start] = 1
header = bytes(4096)
while int(socket.recv()):
    for start in range(0, len(region), {CHUNK}):
        socket.send_multipart([b"chunk", header], zmq.SNDMORE)
        socket.send(region[start : start + {CHUNK}], copy=False)
"""


_READ = f"""
import ctypes, mmap, sys
from kvstore.peer.nixl_agent import _load
nixl = _load()
region = mmap.mmap(-1, {CHUNKS * CHUNK})
for start in range(0, len(region), 4096):
    region[start] = 1
base = ctypes.addressof(ctypes.c_char.from_buffer(region))
config = nixl.nixlAgentConfig()
config.useProgThread, config.pthrDelay = True, 100
agent = nixl.nixlAgent(sys.argv[1], config)
ucx = [agent.createBackend("UCX", {{}})]
agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(base, len(region), 0, b"")]), ucx)
"""
_READ_FROM = """
print(base, agent.getLocalMD().hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def bare_nixl() -> Iterator[Callable[[], None]]:
    """Reads all chunks, one after another, from the memory of a process that does nothing."""
    scope: dict[str, Any] = {}
    with subprocess.Popen(
        [sys.executable, "-c", _READ + _READ_FROM, "bare-server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        remote, metadata = owner.stdout.readline().split()
        exec(_READ.replace("sys.argv[1]", "'bare-client'"), scope)
        nixl, local = scope["nixl"], scope["base"]
        name = scope["agent"].loadRemoteMD(bytes.fromhex(metadata.decode())).decode()

        def describe(start: int) -> Any:
            return nixl.nixlXferDList(nixl.DRAM_SEG, [(start, CHUNK, 0)])

        def read() -> None:
            agent = scope["agent"]
            for start in range(0, CHUNKS * CHUNK, CHUNK):
                sides = describe(local + start), describe(int(remote) + start)
                handle = agent.createXferReq(nixl.NIXL_READ, *sides, name, "", scope["ucx"])
                status = agent.postXferReq(handle, "")
                while status == nixl.NIXL_IN_PROG:
                    status = agent.getXferStatus(handle)
                agent.releaseXferReq(handle)

        try:
            yield read
        finally:
            scope.clear()  # or the agent's thread runs on while the traceback of a failure holds this frame
            owner.stdin.close()


@contextmanager
def bare_zmq() -> Iterator[Callable[[], None]]:
    """Receives all chunks into memory of its own from a process that sends them without a copy."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.rcvbuf = 4 << 20
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        region = memoryview(mmap(-1, CHUNKS * CHUNK))
        header = memoryview(bytearray(4096))

        def receive() -> None:
            socket.send(b"1")
            for start in range(0, len(region), CHUNK):
                socket.recv()
                socket.recv_into(header)
                socket.recv_into(region[start : start + CHUNK])

        with subprocess.Popen([sys.executable, "-c", _SENDER, f"tcp://127.0.0.1:{port}"]):
            yield receive
            socket.send(b"0")


def fill(owner: kvstore.Store, count: int) -> list[bytes]:
    keys = [os.urandom(16) for _ in range(count)]
    for key in keys:
        owner.put(key, key * (owner.chunk_size // len(key)))
    return keys


@pytest.mark.parametrize(
    ("transport", "way", "bare", "least"),
    [
        ("zmq", "stream", bare_zmq, 0.9),
        pytest.param("nixl", "nixl", bare_nixl, 0.8, marks=needs_nixl),
    ],
    ids=["zmq", "nixl"],
)
def test_throughput(
    benchmark: BenchmarkFixture,
    transport: str,
    way: str,
    bare: Callable[[], AbstractContextManager[Callable[[], None]]],
    least: float,
) -> None:
    """256 MiB in chunks of 2 MiB, each verified, against a bare transfer that verifies nothing.

    The owner's checksums are computed in the round that warms up.
    """
    slots = 32 * (CHUNKS + 8)  # of the support's size
    with (
        server(slots, transport=transport, chunk_size=CHUNK) as owner,
        reader(
            peer_of(owner), slots=slots, transport=transport, chunk_size=CHUNK, engine="processes"
        ) as store,
        bare() as receive,
    ):
        keys = fill(owner, CHUNKS)

        def promote() -> None:
            assert len(store.prefetch(keys).result().promoted) == CHUNKS

        speed = compare(benchmark, Side("peer", promote, lambda: evict(store)), Side("bare", receive))["bare"]
        assert store.stats().tier("peer").custom[f"peer_{way}"] == CHUNKS * (ROUNDS + 1)
    assert speed >= least


@contextmanager
def connected(owner: kvstore.Store) -> Iterator[Backend]:
    backend = create(TierConfig(url=peer_of(owner), transport="zmq"), owner.namespace)
    with closing(backend):
        backend.open()
        yield backend


@pytest.mark.parametrize(("busy", "most"), [(False, 0.002), (True, 0.010)], ids=["idle", "busy"])
def test_lookup_of_a_thousand_keys(benchmark: BenchmarkFixture, busy: bool, most: float) -> None:
    """One round trip; in seconds, while the owner sleeps and while its main loop polls."""
    program = (
        "import kvstore, os, sys, time\n"
        f"store = kvstore.open('ram://?capacity=8MiB&pin=off', chunk_size=4096, serve='tcp://127.0.0.1:0')\n"
        "store.put_many({n.to_bytes(16): b'x' for n in range(1000)})\n"
        "print(store.served_at, flush=True)\n"
        "table = {n.to_bytes(16): n for n in range(4096)}\n"
        f"while {busy}:\n"
        "    for _ in range(5):\n"
        "        for key in table:\n"
        "            table[key]\n"
        "    store.poll()\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip().replace("tcp://", "peer://")
        keys = [number.to_bytes(16) for number in range(1000)]
        backend = create(TierConfig(url=url), kvstore.Namespace({}, 4096))
        with closing(backend):
            backend.open()
            assert all(backend.exists(keys))
            benchmark.pedantic(backend.exists, args=(keys,), rounds=200, warmup_rounds=10)
        owner.kill()
    assert benchmark.stats.stats.median < most


def test_from_commit_to_arrival(benchmark: BenchmarkFixture) -> None:
    """A chunk that is waited for: milliseconds from its commit to its arrival, transfer included."""
    with server(chunk_size=4096) as owner, connected(owner) as backend:
        out = memoryview(mmap(-1, 4096))
        late = []
        for _ in range(100):
            key = os.urandom(16)
            with owner.reserve([key]) as lease:
                arrived: list[float] = []
                waiting = threading.Thread(
                    target=lambda key=key, arrived=arrived: (
                        backend.read_into(key, out),
                        arrived.append(time.perf_counter()),
                    )
                )
                waiting.start()
                while not any(link.books._waiting for link in gate_of(owner)._links.values()):
                    owner.poll()
                started = time.perf_counter()
                lease.commit()
            waiting.join()
            late.append(arrived[0] - started)
        benchmark.extra_info["milliseconds"] = median(late) * 1e3
        benchmark.pedantic(sum, args=(late,), rounds=1)
    assert median(late) < 0.003


@pytest.mark.parametrize("transport", ["zmq", pytest.param("nixl", marks=needs_nixl)])
def test_idle(benchmark: BenchmarkFixture, transport: str) -> None:
    """Two connected processes with nothing to do: at most 0.03 of a core in each."""
    with (
        server(transport=transport) as owner,
        reader(peer_of(owner), transport=transport, engine="processes") as store,
    ):
        owner.put(b"k" * 16, b"x")
        assert store.get(b"k" * 16) == b"x"
        pids = {"owner": os.getpid(), "serving": gate_of(owner).pids[0], "reading": store._engine.pids[0]}
        time.sleep(0.5)
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        time.sleep(4)
        share = {name: (cpu_seconds(pid) - before[name]) / 4 for name, pid in pids.items()}
        benchmark.extra_info["cores"] = share
        benchmark.pedantic(owner.stats, rounds=1)
    assert max(share.values()) < 0.03


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads, to the nanosecond; that of threads which have ended is not in it."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
