"""Memory beside the arena, per key, at a million keys of 16 bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _memory import CASES, KEYS
from pytest_benchmark.fixture import BenchmarkFixture

AT_MOST = {"chunk, lru": 300, "chunk, arc": 300, "ghost, arc": 160, "presence": 160}


@pytest.mark.parametrize("case", CASES)
def test_bytes_per_key(benchmark: BenchmarkFixture, case: str) -> None:
    def measure() -> float:
        script = Path(__file__).with_name("_memory.py")
        done = subprocess.run(
            [sys.executable, script, case], check=True, capture_output=True, text=True, timeout=100
        )
        return float(done.stdout)

    used = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info["keys"] = KEYS
    benchmark.extra_info["bytes per key"] = round(used)
    assert 0 < used <= AT_MOST[case]
