"""What vLLM asks of an adapter, by name: on the version that is installed and on the next one.

Of the next one its pure Python part is enough: ``KVSTORE_VLLM_NEXT`` names a folder with an unpacked wheel
(``tox -e vllm`` makes one).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore_vllm import _compat

_HERE = Path(__file__).parent
_NEXT = os.environ.get("KVSTORE_VLLM_NEXT", "")

#: Class -> what an adapter must implement.
ABSTRACT = {
    "OffloadingManager": ["lookup", "on_new_request", "prepare_load", "prepare_store"],
    "OffloadingWorker": ["get_finished", "submit_load", "submit_store", "wait"],
    "OffloadingSpec": ["get_manager", "get_worker"],
    "SecondaryTierManager": [
        "drain_jobs",
        "get_finished_jobs",
        "lookup",
        "on_new_request",
        "submit_load",
        "submit_store",
    ],
    "LoadStoreSpec": [],
}
#: Class -> what else it has, in 0.32.
OPTIONAL = {
    "OffloadingManager": [
        "complete_load",
        "complete_store",
        "get_load_source",
        "get_stats",
        "has_pending_work",
        "on_request_finished",
        "on_schedule_end",
        "reset_cache",
        "shutdown",
        "take_events",
        "touch",
    ],
    "OffloadingWorker": ["shutdown"],
    "OffloadingSpec": ["build_metric_definitions"],
    "SecondaryTierManager": [
        "block_size_bytes",
        "bp_detector",
        "build_metric_definitions",
        "cache_hit_source",
        "get_stats",
        "has_pending_work",
        "medium",
        "on_request_finished",
        "on_schedule_end",
        "serve_external_requests",
        "shutdown",
        "take_events",
        "touch",
    ],
    "LoadStoreSpec": [],
}
#: What 0.33 adds.
ADDED = {
    "OffloadingManager": ["config_info", "lock", "on_reset_flushed"],
    "OffloadingSpec": ["config_info_keys"],
    "SecondaryTierManager": ["config_info", "config_info_keys", "tolerates_off_thread_polling"],
}


def run(version: str, script: str, *arguments: object) -> str:
    """What a program prints that finds vLLM of this version first."""
    path = [str(_HERE), *([_NEXT] if version == "0.33" else [])]
    done = subprocess.run(
        [sys.executable, str(_HERE / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module", params=["0.32", "0.33"])
def version(request: pytest.FixtureRequest) -> str:
    if request.param == "0.33" and not _NEXT:
        pytest.skip("no vLLM 0.33 to compare with: KVSTORE_VLLM_NEXT names no folder")
    return str(request.param)


@pytest.fixture(scope="module")
def report(version: str) -> dict[str, Any]:
    found = json.loads(run(version, "contract_report.py"))
    assert found["version"].startswith(version)
    return dict(found["classes"])


@pytest.mark.parametrize("name", ABSTRACT)
class TestClasses:
    def test_what_must_be_implemented_has_not_changed(self, report: dict[str, Any], name: str) -> None:
        assert report[name]["abstract"] == ABSTRACT[name]

    def test_what_may_be_implemented_has_not_changed(
        self, report: dict[str, Any], name: str, version: str
    ) -> None:
        added = ADDED.get(name, []) if version == "0.33" else []
        assert report[name]["members"] == sorted([*ABSTRACT[name], *OPTIONAL[name], *added])

    def test_ours_implements_all_of_it(self, report: dict[str, Any], name: str) -> None:
        assert report[name]["missing"] == []

    def test_ours_takes_the_same_parameters(self, report: dict[str, Any], name: str) -> None:
        assert report[name]["unlike"] == {}


def test_bytes_come_back_without_an_engine(version: str, tmp_path: Path) -> None:
    assert run(version, "adapter_round_trip.py", tmp_path) == "right"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("0.32.0", ""),
        ("0.33.1+cpu", ""),
        ("0.31.9", "made for vLLM 0.32 and 0.33, this is 0.31.9"),
        ("0.34.0.dev1", "this is 0.34.0.dev1"),
        ("dev", "calls itself 'dev'"),
    ],
)
def test_versions_that_nobody_has_tried_are_told(found: str, told: str) -> None:
    warning = _compat.check_version(found)
    assert told in warning
    assert bool(told) == bool(warning)
