"""The rendezvous of an engine's processes: real ones, some of them killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import kvstore
from kvstore import ClosedError, ConfigError, NoSpaceError
from kvstore.arena import Arena
from kvstore.config import HostConfig, StoreConfig, TierConfig
from kvstore.opening import assemble
from kvstore_vllm.identity import Identity
from kvstore_vllm.rendezvous import Membership, join
from support.chunks import CHUNK, chunk_key, payload
from support.processes import Footprint, has_ended, mappers, state, wait_for

SLOT = 4096
CAPACITY = 8 * SLOT
IDENTITY = Identity(fields={"model": "m", "layers": [1, 2]}, unknown=())
FACTS = {"packed": True}

#: A member that does what it is told on stdin, a line each, and answers with a line of JSON.
MEMBER = """
import json, os, sys
from kvstore_vllm.identity import Identity
from kvstore_vllm.rendezvous import join

options = json.loads(sys.argv[1])
fields = options.pop("fields")
identity = None if fields is None else Identity(fields=fields, unknown=())
try:
    member = join(identity=identity, **options)
    print(json.dumps({"fields": member.identity.fields, "facts": member.facts}), flush=True)
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    sys.exit()
for line in sys.stdin:
    order, *rest = line.split()
    answer = None
    if order == "write":
        member.arena.view(int(rest[0]))[:1] = rest[1].encode()
    elif order == "read":
        answer = bytes(member.arena.view(int(rest[0]))[:1]).decode()
    elif order == "close":
        member.close()
    elif order == "fork":
        answer = os.fork()
        if not answer:
            os.close(1)
            sys.stdin.read()
            os._exit(0)
    print(json.dumps(answer), flush=True)
"""


class Process:
    """A member in a process of its own."""

    def __init__(self, name: str, rank: int | None, fields: dict[str, Any] | None, **options: Any) -> None:
        told = {
            "name": name,
            "capacity": CAPACITY,
            "chunk_size": SLOT,
            "rank": rank,
            "fields": fields,
        } | options
        self.popen = subprocess.Popen(
            [sys.executable, "-c", MEMBER, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def answer(self) -> Any:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def ask(self, order: str) -> Any:
        assert self.popen.stdin is not None
        print(order, file=self.popen.stdin, flush=True)
        return self.answer()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


Start = Callable[..., Process]


@pytest.fixture
def name() -> str:
    return f"engine-{uuid.uuid4()}"


@pytest.fixture
def start(name: str) -> Iterator[Start]:
    """``start(rank)``: a member in a process of its own; killed at the end."""
    started: list[Process] = []

    def start(rank: int | None, fields: dict[str, Any] | None = None, **options: Any) -> Process:
        if rank is not None and fields is None:
            fields = IDENTITY.fields
        started.append(Process(name, rank, fields, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        for pipe in (process.popen.stdin, process.popen.stdout):
            if pipe is not None:
                pipe.close()


def join_here(
    name: str, rank: int | None, identity: Identity | None = IDENTITY, **options: Any
) -> Membership:
    given: dict[str, Any] = {"capacity": CAPACITY, "chunk_size": SLOT, "timeout": 20.0} | options
    return join(name, rank=rank, identity=None if rank is None else identity, **given)


class TestMeeting:
    def test_ranks_and_scheduler_share_one_arena_whoever_comes_first(self, start: Start) -> None:
        members = [start(rank, facts=FACTS) for rank in range(3)] + [start(None)]
        for member in members:
            assert member.answer() == {"fields": IDENTITY.fields, "facts": FACTS}
        for slot, member in enumerate(members):
            member.ask(f"write {slot} {slot}")
        for member in members:
            assert [member.ask(f"read {slot}") for slot in range(4)] == ["0", "1", "2", "3"]

    def test_scheduler_that_comes_first_waits_for_a_worker(self, start: Start) -> None:
        scheduler = start(None)
        worker = start(0)
        assert worker.answer()["fields"] == scheduler.answer()["fields"] == IDENTITY.fields

    def test_what_is_unknown_of_the_identity_is_passed_on(self, name: str) -> None:
        doubtful = Identity(fields={"model": "m"}, unknown=("weights", "revision"))
        with join_here(name, 0, doubtful), join_here(name, None) as scheduler:
            assert scheduler.identity == doubtful

    def test_members_within_one_process(self, name: str) -> None:
        with join_here(name, 0) as worker, join_here(name, None) as scheduler:
            worker.arena.view(3)[:] = b"w" * SLOT
            assert scheduler.arena.view(3) == b"w" * SLOT
            scheduler.arena.control[0] = 7
            assert worker.arena.control[0] == 7
            worker.close()
            scheduler.arena.view(3)[:] = b"s" * SLOT  # its own mapping, which outlives the host's

    def test_threads_that_race_elect_one_host(self, name: str) -> None:
        found: list[Membership] = []
        threads = [
            threading.Thread(target=lambda r=rank: found.append(join_here(name, r))) for rank in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({os.fstat(member.arena.fd).st_ino for member in found}) == 1
        for member in found:
            member.close()

    def test_large_identities_travel(self, name: str, start: Start) -> None:
        large = {f"field {number}": "x" * 1000 for number in range(3000)}
        with join_here(name, 0, Identity(fields=large, unknown=())):
            assert start(None).answer()["fields"] == large

    def test_engines_of_other_names_are_left_alone(self, name: str) -> None:
        with join_here(name, 0) as one, join_here(f"{name} too", 0) as other:
            assert os.fstat(one.arena.fd).st_ino != os.fstat(other.arena.fd).st_ino


class TestRefusals:
    def refused(self, start: Start, *arguments: Any, **options: Any) -> str:
        error = start(*arguments, **options).answer()["error"]
        assert error.startswith("ConfigError: ")
        assert "\n" not in error
        return str(error)

    def test_rank_that_is_taken(self, name: str, start: Start) -> None:
        with join_here(name, 0), join_here(name, 1):
            assert f"rank 0 already, process {os.getpid()}" in self.refused(start, 0)
            assert f"rank 1 already, process {os.getpid()}" in self.refused(start, 1)

    def test_second_scheduler(self, name: str, start: Start) -> None:
        with join_here(name, 0), join_here(name, None):
            assert "a scheduler already" in self.refused(start, None)

    def test_second_engine_in_the_same_process(self, name: str) -> None:
        with join_here(name, 0), pytest.raises(ConfigError, match="engine_id"):
            join_here(name, 0)

    def test_other_identity_names_the_fields(self, name: str, start: Start) -> None:
        with join_here(name, 0):
            error = self.refused(start, 1, {"model": "other", "layers": [1, 2]})
        assert "rank 1 would store other bytes than rank 0: model is " in error
        assert '"other", not "m"' in error
        assert "layers" not in error

    @pytest.mark.parametrize("differing", [{"capacity": 2 * CAPACITY}, {"chunk_size": SLOT // 2}])
    @pytest.mark.parametrize("rank", [1, None])
    def test_other_geometry(
        self, name: str, start: Start, rank: int | None, differing: dict[str, int]
    ) -> None:
        with join_here(name, 0):
            assert "disagree on host memory" in self.refused(start, rank, **differing)

    def test_the_host_lives_on_after_a_refusal(self, name: str, start: Start) -> None:
        with join_here(name, 0):
            self.refused(start, 0)
            assert start(1).answer()["fields"] == IDENTITY.fields

    def test_nobody_comes(self, name: str) -> None:
        with pytest.raises(ClosedError, match="no worker of engine"):
            join_here(name, None, timeout=0.05)

    def test_arena_that_does_not_fit_frees_the_name(self, name: str) -> None:
        with pytest.raises(NoSpaceError):
            join_here(name, 0, capacity=1 << 60)
        join_here(name, 0).close()

    def test_host_that_is_stopped(self, name: str, start: Start) -> None:
        host = start(0)
        host.answer()
        host.popen.send_signal(signal.SIGSTOP)
        wait_for(lambda: state(host.popen.pid) == "T")
        with pytest.raises(ClosedError, match="does not answer"):
            join_here(name, 1, timeout=0.2)


class TestEnds:
    def test_closing_leaves_nothing(self, name: str) -> None:
        before = Footprint.now()
        for _ in range(2):
            with join_here(name, 0) as host, join_here(name, 1) as guest, join_here(name, None):
                guest.close()
                guest.close()
                host.close()
        assert Footprint.now() == before

    def test_place_of_a_killed_member_is_free_again(self, name: str, start: Start) -> None:
        with join_here(name, 0):
            first = start(1)
            first.answer()
            first.kill()
            wait_for(lambda: "fields" in start(1).answer())

    def test_killed_members_leave_no_memory_and_no_name(self, name: str, start: Start) -> None:
        members = [start(0), start(1), start(None)]
        for member in members:
            member.answer()
        with join_here(name, 2) as here:
            inode = os.fstat(here.arena.fd).st_ino
            assert mappers(inode) == {os.getpid(), *(member.pid for member in members)}
            for member in members:
                member.kill()
        assert not mappers(inode)
        join_here(name, 0).close()

    def test_arena_outlives_a_killed_host(self, name: str, start: Start) -> None:
        host = start(0)
        host.answer()
        with join_here(name, 1) as guest:
            host.ask("write 5 h")
            host.kill()
            assert bytes(guest.arena.view(5)[:1]) == b"h"

    def test_forked_child_of_a_dead_host_holds_no_name(self, name: str, start: Start) -> None:
        host = start(0)
        host.answer()
        child = host.ask("fork")
        host.kill()
        assert not has_ended(child, 0)
        join_here(name, 0, timeout=10).close()

    def test_forked_child_of_a_dead_member_holds_no_place(self, name: str, start: Start) -> None:
        with join_here(name, 0):
            member = start(1)
            member.answer()
            child = member.ask("fork")
            member.kill()
            assert not has_ended(child, 0)
            wait_for(lambda: "fields" in start(1).answer())

    def test_host_killed_while_others_wait_is_replaced(self, name: str, start: Start) -> None:
        host = start(0)
        host.answer()
        host.popen.send_signal(signal.SIGSTOP)  # it holds the name and is silent
        guest = start(1)
        wait_for(lambda: _unix_sockets(guest.pid))
        host.kill()
        assert guest.answer()["fields"] == IDENTITY.fields


class TestStoreOverIt:
    """A store whose arena somebody else has made."""

    @pytest.mark.parametrize("engine", ["inline", "threads", "processes"])
    def test_store_over_a_members_arena(self, name: str, tmp_path: Any, engine: Any) -> None:
        config = StoreConfig(
            host=HostConfig(capacity=1 << 30),
            tiers=(TierConfig(url=str(tmp_path)),),
            chunk_size=SLOT,
            engine=engine,
        )
        key = chunk_key(1)
        with join_here(name, 0) as worker, join_here(name, None) as member:
            with assemble(config, arena=member.arena) as store:
                assert store.stats().host.capacity == CAPACITY
                with store.reserve([key]) as lease:
                    worker.arena.view(lease.slots[key])[:CHUNK] = payload(key).ljust(CHUNK)
                assert store.flush(timeout=20)
            worker.arena.view(0)[:] = bytes(SLOT)  # still mapped
        with (
            join_here(name, 0),
            join_here(name, None) as member,
            assemble(config, arena=member.arena) as store,
        ):
            found = store.get(key)
        assert found is not None
        assert found[:CHUNK] == payload(key).ljust(CHUNK)

    def test_peers_read_what_a_member_has_copied(self, name: str) -> None:
        config = StoreConfig(host=HostConfig(capacity=CAPACITY, serve=":0"), chunk_size=SLOT)
        key = chunk_key(1)
        with (
            join_here(name, 0) as worker,
            join_here(name, None) as member,
            assemble(config, arena=member.arena) as store,
        ):
            assert store.served_at is not None
            with store.reserve([key]) as lease:
                worker.arena.view(lease.slots[key])[:CHUNK] = payload(key).ljust(CHUNK)
            url = store.served_at.replace("tcp://", "peer://")
            with kvstore.open(f"ram://?capacity={CAPACITY}&pin=off", url, chunk_size=SLOT) as other:
                found = other.get(key)
        assert found is not None
        assert found[:CHUNK] == payload(key).ljust(CHUNK)

    def test_chunks_of_another_size_are_refused(self) -> None:
        arena = Arena.create(CAPACITY, SLOT)
        with arena, pytest.raises(ConfigError, match="does not fit an arena"):
            assemble(StoreConfig(host=HostConfig(capacity=1 << 30), chunk_size=SLOT // 2), arena=arena)


def _unix_sockets(pid: int) -> list[str]:
    targets = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since the look
            targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [target for target in targets if target.startswith("socket:")]
