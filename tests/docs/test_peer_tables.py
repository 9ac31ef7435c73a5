"""The tables of what holds between peers name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["docs/explanation/peers.md", "docs/reference/peer-protocol.md"]


def named_in(page: str) -> list[tuple[str, str]]:
    """File and name, which is empty where the whole file is meant; a name alone is of the file before it."""
    named = []
    for row in re.findall(r"^\|.*\|$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        file = ""
        for new_file, name in re.findall(r"`(?:(test_\w+\.py)(?:::)?)?((?:test_|Test)\w+)?`", row):
            file = new_file or file
            if new_file or name:
                named.append((file, name))
    return named


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    named = named_in(page)
    assert len(named) > 10
    for file, name in named:
        [path] = (ROOT / "tests").rglob(file)
        assert re.search(rf"^\s*(def|class) {name}\b" if name else "", path.read_text(), re.MULTILINE), name
