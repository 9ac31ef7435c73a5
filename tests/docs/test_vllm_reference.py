"""The reference page of the vLLM adapter says what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstore.config import Option
from kvstore_vllm.config import KEYS, TIER_KEYS, parse

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "vllm.md").read_text(encoding="utf-8")
OPTIONS = {
    f"{where}.{key.name}": key for where, keys in {"": KEYS, **TIER_KEYS}.items() for key in keys.values()
}


def table(keys: list[Option]) -> str:
    rows = [["Key", "Default", "Example", "Meaning"], ["---"] * 4]
    rows += [[f"`{key.name}`", default(key), f"`{key.example}`", key.help] for key in keys]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def default(key: Option) -> str:
    return "" if key.default in (None, "") else f"`{key.format(key.default)}`"


def value(key: Option) -> object:
    """The example as it would stand in JSON: with or without quotes."""
    try:
        return json.loads(key.example)
    except ValueError:
        return key.example


def own(kind: str) -> list[Option]:
    """Keys of one type of tier, without those of every type."""
    common = set.intersection(*map(set, TIER_KEYS.values()))
    return [key for name, key in TIER_KEYS[kind].items() if name not in common]


TABLES = {
    "keys": list(KEYS.values()),
    "every tier": [
        key for name, key in TIER_KEYS["fs"].items() if all(name in k for k in TIER_KEYS.values())
    ],
    **{kind: own(kind) for kind in TIER_KEYS},
}


@pytest.mark.parametrize("keys", TABLES.values(), ids=TABLES.keys())
def test_table_stands_on_its_page(keys: list[Option]) -> None:
    assert table(keys) in PAGE, f"\n{table(keys)}"


@pytest.mark.parametrize("key", OPTIONS.values(), ids=OPTIONS.keys())
def test_keys_explain_themselves(key: Option) -> None:
    """Each has a sentence of help, and an example that it accepts and that is not its default."""
    assert key.help.endswith(".")
    assert key.parse(value(key), "here") != key.default


def test_configurations_on_the_page_are_accepted() -> None:
    blocks = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        assert parse(json.loads(block)).warnings == ()
