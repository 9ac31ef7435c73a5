"""The command, and a small trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import Command


@pytest.fixture
def kv(tmp_path: Path) -> Command:
    """The command, in an empty directory."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    return Command(folder)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two users with one system prompt: 4 requests, 14 references, 8 chunks."""
    path = tmp_path / "small.jsonl"
    rows = [(0, [1, 2, 3]), (100, [1, 2, 4]), (200, [1, 2, 3, 5]), (300, [1, 6, 7, 8])]
    path.write_text("".join(json.dumps({"timestamp": t, "hash_ids": ids}) + "\n" for t, ids in rows))
    return path
