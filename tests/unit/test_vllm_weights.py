"""Fingerprints of weights, where they are, and values that have an exact text."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from vllm_facts import TENSORS, write_weights

from kvstore_vllm._facts import Unrepresentable, plain
from kvstore_vllm.weights import commit_of, fingerprint, local_directory


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_fingerprint_of_every_tensor(tmp_path: Path) -> None:
    """A change of each tensor is seen, were it only in its middle."""
    path = write_weights(tmp_path)
    start = path.stat().st_size - sum(TENSORS.values())
    seen = {fingerprint(tmp_path)}
    for size in TENSORS.values():
        flip(path, start + size // 2)
        seen.add(fingerprint(tmp_path))
        start += size
    assert len(seen) == 1 + len(TENSORS)


def test_fingerprint_of_names_sizes_and_code(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors={"a": 8})
    seen = [fingerprint(tmp_path)]
    write_weights(tmp_path, tensors={"b": 8})
    seen.append(fingerprint(tmp_path))
    (tmp_path / "modeling.py").write_text("x = 1")
    seen.append(fingerprint(tmp_path))
    (tmp_path / "README.md").write_text("not weights")
    (tmp_path / "sub").mkdir()
    assert fingerprint(tmp_path) == seen[-1]
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    seen.append(fingerprint(tmp_path))
    assert len(set(seen)) == 4


@pytest.mark.parametrize("size", [0, 1, 5000, 3_000_000])
def test_fingerprint_of_other_formats(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(size))
    before = fingerprint(path)
    assert before == fingerprint(tmp_path)
    path.write_bytes(b"\1" * size + b"\1")
    assert fingerprint(path) != before


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 16, struct.pack("<Q", 3) + b"{a}"])
def test_what_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError):
        fingerprint(tmp_path)


def test_where_the_files_are(tmp_path: Path) -> None:
    assert local_directory(str(tmp_path), None, None) == str(tmp_path)
    assert local_directory("kvstore-tests/no-such-model", None, str(tmp_path)) is None
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert commit_of(f"/cache/models--a--b/snapshots/{commit}") == commit
    assert commit_of(f"/mnt/{commit}") is None
    assert commit_of("/cache/models--a--b/snapshots/main") is None


# Plain values


class Colour(Enum):
    RED = 1


@dataclass
class Point:
    x: int


def test_plain_values() -> None:
    given = {1: (True, None, 2.5), "s": {"b", "a"}, "e": Colour.RED, "d": Point(3), "i": float("-inf")}
    assert plain(given) == {"1": [True, None, 2.5], "s": ["a", "b"], "e": "RED", "d": {"x": 3}, "i": "-inf"}


@pytest.mark.parametrize("value", [object(), b"x", Point, len])
def test_values_without_exact_text(value: Any) -> None:
    with pytest.raises(Unrepresentable):
        plain([value])
