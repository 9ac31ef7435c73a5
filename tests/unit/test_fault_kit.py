"""The fault kit: each fault does what it says, when its rule says so, and says that it did."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import msgspec
import pytest

from kvstore.backends import BackendContext, create
from kvstore.backends.generic import GenericBackend
from kvstore.backends.memory import MemoryBackend, forget
from kvstore.backends.posix import PosixBackend
from kvstore.config import TierConfig
from kvstore.errors import CorruptChunkError
from kvstore.namespace import Namespace
from kvstore.testing.backend import BackendTests, make_key
from kvstore.testing.faults import Fault, FaultPlan, FaultyBackend, Rule

SIZE = 8192
NAMESPACE = Namespace({"model": "faults"}, chunk_size=SIZE)
CONTEXT = BackendContext(NAMESPACE.fingerprint, NAMESPACE.manifest, SIZE)
ERRORS = [Fault.EIO, Fault.ENOSPC, Fault.EACCES, Fault.EMFILE]
PAYLOAD = bytes(range(256)) * (SIZE // 256)
KEY, OTHER = make_key(1), make_key(2)


def make_slot(content: bytes = b"") -> memoryview:
    return memoryview(bytearray(content.ljust(SIZE, b"\0")))


class TestWithoutRules(BackendTests):
    """A wrapper that has nothing to inject is the backend itself."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.plan = FaultPlan([], tmp_path / "plan")
        self.folder = tmp_path / "space"

    def make_backend(self, context: BackendContext) -> FaultyBackend:
        return FaultyBackend(PosixBackend(context, str(self.folder)), self.plan)

    def raw_get(self, key: bytes) -> bytes | None:
        path = self.folder / key.hex()[:2] / f"{key.hex()}.kv"
        return path.read_bytes() if path.exists() else None

    def raw_set(self, key: bytes, data: bytes) -> None:
        path = self.folder / key.hex()[:2] / f"{key.hex()}.kv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_list(self) -> list[str]:
        files = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]
        return [name for name in files if name != "namespace.json"]


class Case:
    """Backends over one storage: `sound` has no faults, `faulty()` has those of a plan."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.sound = self._make(f"file://{folder}")
        self.sound.open()

    def faulty(self, *rules: Rule) -> tuple[FaultyBackend | GenericBackend, FaultPlan]:
        plan = FaultPlan(rules)
        if self.kind == "filesystem":
            backend = self._make(f"fault::file://{self.folder}", {"fault": plan.options})
            backend.open()
            return backend, plan
        wrapped = FaultyBackend(self._make(f"file://{self.folder}"), plan)
        wrapped.open()
        return wrapped, plan

    def _make(self, url: str, options: dict | None = None) -> PosixBackend | GenericBackend | MemoryBackend:
        match self.kind:
            case "filesystem" | "generic":
                return GenericBackend(CONTEXT, url, NAMESPACE.directory, options)
            case "memory":
                return MemoryBackend(CONTEXT, str(self.folder), NAMESPACE.directory)
        return PosixBackend(CONTEXT, str(self.folder / NAMESPACE.directory))


@pytest.fixture(params=["posix", "generic", "memory", "filesystem"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    yield Case(request.param, tmp_path)
    forget(str(tmp_path))


# Errors.


@pytest.mark.parametrize("fault", ERRORS)
def test_errors_raise_and_end(case: Case, fault: Fault) -> None:
    verbs = ["get", "put", "exists", "delete"]
    backend, plan = case.faulty(*(Rule(fault, verb, times=1) for verb in verbs))
    case.sound.write(OTHER, make_slot(PAYLOAD))
    calls = {
        "get": lambda: backend.read_into(OTHER, make_slot()),
        "exists": lambda: backend.exists([OTHER]),
        "delete": lambda: backend.delete([OTHER]),
        # put comes last: a generic backend looks for the object before it writes
        "put": lambda: backend.write(KEY, make_slot(PAYLOAD)),
    }
    for call in calls.values():
        with pytest.raises(OSError, match="injected") as raised:
            call()
        assert raised.value.errno == getattr(errno, fault.value)
    assert backend.write(KEY, make_slot(PAYLOAD)) is True
    assert [injection.verb for injection in plan.log()] == list(calls)
    assert {(injection.fault, injection.pid) for injection in plan.log()} == {(fault, os.getpid())}


def test_opening_and_listing(tmp_path: Path) -> None:
    plan = FaultPlan([Rule(Fault.EIO, "open", times=1), Rule(Fault.EACCES, "scan", times=1)])
    backend = FaultyBackend(PosixBackend(CONTEXT, str(tmp_path)), plan)
    with pytest.raises(OSError, match="injected"):
        backend.open()
    assert not (tmp_path / "namespace.json").exists()
    backend.open()
    with pytest.raises(PermissionError):
        list(backend.scan())
    assert list(backend.scan()) == []


# Faults of data: below the verification, so that none gets through.


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, SIZE])
@pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.FLIPPED_BIT])
def test_harmed_reads_are_refused(case: Case, fault: Fault, size: int) -> None:
    case.sound.write(KEY, make_slot(PAYLOAD)[:size])
    backend, plan = case.faulty(Rule(fault, "get", times=1))
    with pytest.raises(CorruptChunkError):
        backend.read_into(KEY, make_slot())
    assert len(plan.log()) == 1
    out = make_slot()
    assert backend.read_into(KEY, out) == size  # the object itself is sound
    assert out[:size] == PAYLOAD[:size]


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, SIZE])
@pytest.mark.parametrize("fault", [Fault.TORN, Fault.FLIPPED_BIT, Fault.SHORT_WRITE])
def test_harmed_objects_are_refused(case: Case, fault: Fault, size: int) -> None:
    backend, plan = case.faulty(Rule(fault, "put", times=1))
    if fault is Fault.SHORT_WRITE:
        with pytest.raises(OSError, match="No space"):
            backend.write(KEY, make_slot(PAYLOAD)[:size])
    else:
        assert backend.write(KEY, make_slot(PAYLOAD)[:size]) is True
    assert len(plan.log()) == 1
    if case.kind == "filesystem" and fault is Fault.SHORT_WRITE:
        assert case.sound.exists([KEY]) == [False]  # half of it was a temporary file, which is gone
    else:
        with pytest.raises(CorruptChunkError):
            case.sound.read_into(KEY, make_slot())


def test_vanish_is_between_probe_and_read(case: Case) -> None:
    case.sound.write(KEY, make_slot(PAYLOAD))
    backend, _ = case.faulty(Rule(Fault.VANISH, "get"))
    assert backend.exists([KEY]) == [True]
    assert backend.read_into(KEY, make_slot()) is None
    assert case.sound.exists([KEY]) == [False]


# Delays and hangs.


def test_a_delay_ends_by_itself(case: Case) -> None:
    backend, plan = case.faulty(Rule(Fault.DELAY, "put", seconds=0.01))
    assert backend.write(KEY, make_slot(PAYLOAD)) is True
    assert case.sound.read_into(KEY, make_slot()) == SIZE
    assert plan.log()[0].fault is Fault.DELAY


def test_a_hang_ends_when_the_plan_is_healed(case: Case) -> None:
    case.sound.write(KEY, make_slot(PAYLOAD))
    backend, plan = case.faulty(Rule(Fault.HANG, "get", times=1))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(backend.read_into, KEY, make_slot())
        while not plan.log():
            assert not reading.done()
        assert not reading.done()
        plan.heal()
        assert reading.result(timeout=10) == SIZE


def test_a_hang_in_another_process(tmp_path: Path) -> None:
    plan = FaultPlan([Rule(Fault.HANG, "exists")], tmp_path / "plan")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).meet('exists'))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(pickle.dumps(plan))
        process.stdin.close()
        while not plan.log():
            assert process.poll() is None
        plan.heal()
        assert process.stdout.read() == b"None\n"
    assert plan.log()[0].pid == process.pid


# Rules.


def test_by_key(case: Case) -> None:
    backend, plan = case.faulty(Rule(Fault.EIO, "get", key=KEY.hex()))
    for key in (KEY, OTHER):
        case.sound.write(key, make_slot(PAYLOAD))
    assert backend.read_into(OTHER, make_slot()) == SIZE
    with pytest.raises(OSError, match="injected"):
        backend.read_into(KEY, make_slot())
    assert [injection.keys for injection in plan.log()] == [[KEY.hex()]]


def test_by_count() -> None:
    plan = FaultPlan([Rule(Fault.EIO, "get", skip=2, times=2), Rule(Fault.ENOSPC, "get", skip=3)])
    met = []
    for _ in range(8):
        try:
            met.append(plan.meet("get"))
        except OSError as error:
            met.append(errno.errorcode[error.errno])
    # The second rule counts only what the first lets through.
    assert met == [None, None, "EIO", "EIO", None, "ENOSPC", "ENOSPC", "ENOSPC"]


def test_by_tier(tmp_path: Path) -> None:
    plan = FaultPlan([Rule(Fault.EIO, "exists", tier="bad")])
    good, bad = (
        plan(TierConfig(url=f"file://{tmp_path}/{name}", name=name), NAMESPACE) for name in ("good", "bad")
    )
    assert good.exists([KEY]) == [False]
    with pytest.raises(OSError, match="injected"):
        bad.exists([KEY])


def test_counts_are_shared_by_threads() -> None:
    plan = FaultPlan([Rule(Fault.SHORT_READ, "get", skip=100, times=50)])
    barrier = threading.Barrier(8)

    def work(_: int) -> int:
        barrier.wait()
        return sum(plan.meet("get") is not None for _ in range(40))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 50
    assert len(plan.log()) == 50


def test_a_plan_that_is_healed_injects_nothing() -> None:
    plan = FaultPlan([Rule(Fault.EIO, "get")])
    assert not plan.healed
    plan.heal()
    assert plan.healed
    assert plan.meet("get") is None
    assert plan.log() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"fault": "vanish", "verb": "put"},
        {"fault": "torn", "verb": "get"},
        {"fault": "flipped-bit", "verb": "exists"},
        {"fault": "EIO", "verb": "put", "step": 3},
        {"fault": "hang", "verb": "get", "step": 3},
        {"fault": "hang", "verb": "put", "step": 9},
        {"fault": "ENOENT", "verb": "get"},
        {"fault": "EIO", "verb": "read"},
    ],
)
def test_rules_that_could_never_strike_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError):
        FaultPlan([fields])


def test_plain_data_and_pickles_keep_rules(tmp_path: Path) -> None:
    rule = Rule(Fault.DELAY, "put", key=KEY.hex(), tier="t", skip=1, times=2, seconds=0.5, step=3)
    plan = FaultPlan([rule], tmp_path / "plan")
    again = FaultPlan(msgspec.json.decode(msgspec.json.encode(plan.options))["rules"])
    assert again.rules == (rule,) == pickle.loads(pickle.dumps(plan)).rules


def test_a_temporary_folder_goes_with_the_plan() -> None:
    plan = FaultPlan([])
    folder = plan.folder
    assert folder.is_dir()
    backend = FaultyBackend(MemoryBackend(CONTEXT, "gone", "x"), plan)
    del plan
    assert folder.is_dir()
    del backend
    assert not folder.exists()


def test_metrics_of_the_inner_backend_pass(tmp_path: Path) -> None:
    inner = PosixBackend(CONTEXT, str(tmp_path))
    backend = FaultyBackend(inner, FaultPlan([]))
    inner.counters["x"] = 1.0
    assert backend.counters == {"x": 1.0}
    backend.counters = {}  # as a worker does
    inner.counters["x"] = 2.0
    assert backend.counters == {"x": 2.0}
    assert backend.capabilities == inner.capabilities


# Steps of the write protocol.


def test_steps_come_in_order_and_once(tmp_path: Path) -> None:
    plan = FaultPlan([Rule(Fault.DELAY, "put", step=step, seconds=0.0) for step in range(1, 9)])
    backend = FaultyBackend(PosixBackend(CONTEXT, str(tmp_path), durability="full"), plan)
    backend.open()
    assert plan.log() == []  # the manifest is no chunk
    assert backend.write(KEY, make_slot(PAYLOAD)) is True
    assert [injection.step for injection in plan.log()] == list(range(1, 9))
    assert backend.read_into(KEY, make_slot()) == SIZE


def test_steps_are_those_of_files() -> None:
    plan = FaultPlan([Rule(Fault.HANG, "put", step=1)])
    with pytest.raises(ValueError, match="MemoryBackend"):
        FaultyBackend(MemoryBackend(CONTEXT, "steps", "x"), plan)


# The filesystem.


def test_as_a_tier(tmp_path: Path) -> None:
    plan = FaultPlan([Rule(Fault.EIO, "get", times=1)])
    tier = TierConfig(url=f"fault::file://{tmp_path}", storage_options={"fault": plan.options})
    backend = create(tier, NAMESPACE)
    backend.open()
    backend.write(KEY, make_slot(PAYLOAD))
    with pytest.raises(OSError, match="injected"):
        backend.read_into(KEY, make_slot())
    assert [row.key for row in backend.scan()] == [KEY]
    assert (tmp_path / NAMESPACE.directory / KEY.hex()[:2] / f"{KEY.hex()}.kv").exists()


def test_files_opened_for_reading_are_harmed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    rules = [{"fault": "short-read", "verb": "get", "times": 1}, {"fault": "vanish", "verb": "get"}]
    fs, _ = fsspec.url_to_fs(f"fault::file://{tmp_path}", rules=rules)
    with fs.open("file", "rb") as file:
        assert file.read() == bytes(50)
    with pytest.raises(FileNotFoundError):
        fs.open("file", "rb")
    assert [injection.fault for injection in fs.plan.log()] == ["short-read", "vanish"]


def test_needs_another_filesystem() -> None:
    with pytest.raises(ValueError, match="in front of"):
        fsspec.filesystem("fault")
