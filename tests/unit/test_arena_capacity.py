"""What the machine, its cgroups and resource limits leave for the host arena."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import memory
from kvstore.arena import Arena
from kvstore.errors import NoSpaceError
from support.programs import run

MIB = 1 << 20


class TestRefusedCapacity:
    def test_more_than_the_machine_has(self) -> None:
        with pytest.raises(NoSpaceError, match=r"16,777,216 MiB, but .* leaves [\d,]+ MiB"):
            Arena.create(16 << 40, MIB)

    def test_more_than_is_available(self) -> None:
        free = min(limit.free for limit in memory.limits())
        with pytest.raises(NoSpaceError):
            Arena.create(free + free // 4, MIB)

    @pytest.mark.parametrize(("name", "limit"), [("RLIMIT_FSIZE", 64 * MIB), ("RLIMIT_AS", 1024 * MIB)])
    def test_more_than_a_resource_limit_allows(self, name: str, limit: int) -> None:
        program = f"""
            import resource
            from kvstore.arena import Arena
            from kvstore.errors import NoSpaceError
            resource.setrlimit(resource.{name}, ({limit}, {limit}))
            Arena.create(32 << 20, 65536, pin="off").close()
            try:
                Arena.create({limit}, 65536, pin="off")
            except NoSpaceError as error:
                print(error)
        """
        assert name in run(program)

    def test_more_than_a_real_cgroup_allows(self) -> None:
        program = """
            from kvstore.arena import Arena
            from kvstore.errors import NoSpaceError
            Arena.create(64 << 20, 65536, pin="off").close()
            try:
                Arena.create(512 << 20, 65536, pin="off")
            except NoSpaceError as error:
                print(error)
        """
        group = Path("/sys/fs/cgroup/memory") / f"kvstore-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        try:
            (group / "memory.limit_in_bytes").write_text(str(256 * MIB))
            enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            message = run(enter + textwrap.dedent(program))
        finally:
            group.rmdir()
        assert f"512 MiB, but the cgroup's {group}/memory.limit_in_bytes leaves" in message
        assert int(re.findall(r"(\d+) MiB;", message)[0]) <= 256


class TestLimits:
    """The figures are read from files made for the purpose, as few machines have all kinds of cgroups."""

    @pytest.fixture
    def machine(self, tmp_path: Path) -> Callable[[dict[str, str]], dict[str, int]]:
        def limits(files: dict[str, str]) -> dict[str, int]:
            for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4096 kB\n", **files}.items():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
            found = memory.limits(tmp_path)
            return {name.replace(f"the cgroup's {tmp_path}/", ""): free for name, free in found}

        return limits

    def test_machine_alone(self, machine: Callable[[dict[str, str]], dict[str, int]]) -> None:
        assert machine({}) == {"the machine (MemAvailable)": 4 * MIB}

    def test_version_2_nested(self, machine: Callable[[dict[str, str]], dict[str, int]]) -> None:
        found = machine(
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/outer/memory.max": "1000000\n",
                "sys/fs/cgroup/outer/memory.current": "400000\n",
                "sys/fs/cgroup/outer/memory.stat": "anon 1\nactive_file 1000\ninactive_file 200\n"
                "slab_reclaimable 30\nshmem 5000\n",
                "sys/fs/cgroup/outer/inner/memory.max": "max\n",
                "sys/fs/cgroup/outer/inner/memory.high": "300000\n",
                "sys/fs/cgroup/outer/inner/memory.current": "350000\n",
            }
        )
        del found["the machine (MemAvailable)"]
        assert found == {
            "sys/fs/cgroup/outer/memory.max": 601230,
            "sys/fs/cgroup/outer/inner/memory.high": 0,
        }

    def test_version_1_in_a_container(self, machine: Callable[[dict[str, str]], dict[str, int]]) -> None:
        found = machine(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/docker/abc/job\n0::/\n",
                "proc/self/mountinfo": "34 31 0:31 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "36 31 0:33 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 500000\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100000\n",
            }
        )
        del found["the machine (MemAvailable)"]
        assert found == {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2500000,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 1900000,
        }

    @pytest.mark.parametrize("path", ["/../elsewhere", "/of/the/host"])
    def test_a_path_that_cannot_be_seen(
        self, machine: Callable[[dict[str, str]], dict[str, int]], path: str
    ) -> None:
        found = machine(
            {
                "proc/self/cgroup": f"0::{path}\n",
                "proc/self/mountinfo": "41 31 0:38 /pod /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "400\n",
            }
        )
        assert found["sys/fs/cgroup/memory.max"] == 600
