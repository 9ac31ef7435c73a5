"""A directory of a million objects: it is counted once, in bounded memory and in short turns; then the books
answer ``kvstore stat``, whatever there is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _garbage import litter

from kvstore.namespace import Namespace

OBJECTS = 1_000_000
CHUNK = 2 << 20
#: Bytes that counting them may take, and seconds that it may keep a worker from other work.
MEMORY, TURN = 100e6, 0.1
#: Seconds for ``kvstore stat``, the start of the command included.
STAT = 1.0


def run(*command: str | Path) -> Any:
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def stat(root: Path) -> Any:
    return run("-m", "kvstore", "stat", root, "--json")


def test_a_million_objects(benchmark: Any, tmp_path: Path) -> None:
    litter(tmp_path, Namespace({"model": "million"}, CHUNK), OBJECTS)
    try:
        script = Path(__file__).with_name("_survey.py")
        survey = run(script, tmp_path, str(CHUNK))
        assert survey.pop("chunks") == OBJECTS
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            found = stat(tmp_path)
            seconds.append(time.perf_counter() - started)
            assert found["chunks"] == OBJECTS
        benchmark.pedantic(stat, args=(tmp_path,), rounds=1)
    finally:
        shutil.rmtree(tmp_path)  # pytest would keep them for three runs
    survey["stat"] = max(seconds)
    benchmark.extra_info.update(survey)
    print(survey)
    assert survey["grown"] <= MEMORY
    assert survey["turns"] > 1 and survey["longest"] <= TURN
    assert survey["stat"] < STAT
