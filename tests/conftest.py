"""Fixtures that every test may use."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

pytest_plugins = ["support.object_store", "support.mounts"]

ROOT = Path(__file__).parent.parent


def pytest_report_header() -> str:
    """Says which tests need what is not installed."""
    if importlib.util.find_spec("vllm"):
        return "tests/with_vllm: collected"
    return "tests/with_vllm: left out, vLLM is not installed (tox -e vllm)"


@pytest.fixture
def lasting_breakers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that goes down stays down for a minute, which a slow machine does not miss; tests that wait for
    its return have clocks that they move on."""
    monkeypatch.setattr("kvstore.health._FIRST", 60.0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the reference traces; they are other people's data and no part of the repository."""
    path = Path(os.environ.get("KVSTORE_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"reference traces are absent: no folder {path} (set KVSTORE_SHARED_DATA)")
    return path
