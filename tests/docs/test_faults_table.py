"""The table of faults names tests that exist, and leaves none out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPLETE = [
    "faults/test_chunk_calls.py",
    "faults/test_errors.py",
    "faults/test_kills.py",
    "faults/test_places.py",
]
"""Files whose tests all stand in the table."""


def names_in(*files: str) -> set[str]:
    texts = [(ROOT / "tests" / file).read_text(encoding="utf-8") for file in files]
    return {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}


def test_every_fault_has_its_test() -> None:
    page = (ROOT / "docs" / "reference" / "faults.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)(?:\[\w+\])?`", page))
    assert named <= names_in(*COMPLETE, "unit/test_quarantine_race.py", "unit/test_repair.py")
    assert names_in(*COMPLETE) <= named
