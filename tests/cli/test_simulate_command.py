"""``kvstore simulate``."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from support.command import Command


def test_published_figures(kv: Command, shared_data: Path, tmp_path: Path) -> None:
    """LRU and ARC on the OLTP trace, as the paper has them, within 0.02 points."""
    plot = tmp_path / "curves.svg"
    report = kv("simulate", shared_data / "oltp_u32le.xz", "--json", "--plot", plot).json
    curves = [(curve["policy"], curve["capacity"]) for curve in report["curves"]]
    assert curves == [("lru", 1000), ("lru", 5000), ("arc", 1000), ("arc", 5000)]
    ratios = [100 * curve["hit_ratio"] for curve in report["curves"]]
    assert ratios == pytest.approx([32.83, 53.65, 38.93, 55.25], abs=0.02)
    assert {curve["requests"] for curve in report["curves"]} == {914145}
    assert "<svg" in plot.read_text()


def test_formats_agree(kv: Command, tmp_path: Path) -> None:
    references = [1, 2, 3, 1, 2, 4, 1]
    (tmp_path / "a").write_text("".join(f"{n}\n" for n in references))
    (tmp_path / "b").write_bytes(array("I", references).tobytes())
    (tmp_path / "c").write_text(f'{{"hash_ids": {references}}}\n')
    for name, format in (("a", "text"), ("b", "u32le"), ("c", "jsonl")):
        report = kv(
            "simulate", tmp_path / name, "--format", format, "--capacity", 3, "--policy", "lru", "--json"
        )
        assert report.json == {
            "curves": [{"policy": "lru", "capacity": 3, "requests": 7, "hits": 3, "hit_ratio": 3 / 7}]
        }


def test_for_people(kv: Command, trace: Path) -> None:
    out = kv("simulate", trace, "--capacity", "2,100", "--limit", 3).out
    assert "42.86 %" not in out
    assert "50.00 %" in out  # 5 of the 10 references of 3 requests
    assert "10 references to 5 different chunks" in out
