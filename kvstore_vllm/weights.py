"""What the weights of a model are, told from their files.

Two models of one architecture have files of equal names and sizes, so that only content tells them apart; to
read all of it would take longer than to load the model. Read are: names and sizes, every header of
safetensors, a sample from the middle of every tensor, and code that lies beside the weights as a whole. Files
of other formats are sampled at even distances. A fine-tune that leaves every sample as it is goes unnoticed
unless it has another commit: ``weights_id`` is for those who edit single rows of a tensor.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

__all__ = ["commit_of", "fingerprint", "local_directory"]

_WEIGHTS = frozenset({".bin", ".gguf", ".pt", ".pth", ".safetensors"})
_CODE = frozenset({".py"})
_SAMPLE = 2048
_EVEN_SAMPLES = 512
_MOST_HEADER = 100 << 20


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Digest of the weights in a directory, or of one file of weights.

    Parameters
    ----------
    path : path
        Files below subdirectories do not count, as vLLM loads none of them.

    Returns
    -------
    str
        32 hex digits.

    Raises
    ------
    FileNotFoundError
        There are no weights.
    OSError, ValueError
        A file cannot be read, or is not what its name says.
    """
    path = Path(path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    weights = [file for file in files if file.suffix in _WEIGHTS]
    if not weights:
        raise FileNotFoundError(f"there are no weights in {str(path)!r}")
    digest = xxhash.xxh3_128()
    for file in [*weights, *(file for file in files if file.suffix in _CODE)]:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for part in _parts(file):
            digest.update(part)
    return digest.hexdigest()


def local_directory(model: str, revision: str | None, cache: str | None) -> str | None:
    """Where the files of `model` are on this machine: a path, or a snapshot in the cache of Hugging Face.

    Parameters
    ----------
    model : str
        Path or name, as vLLM takes it.
    revision : str, optional
    cache : str, optional
        Directory of the cache, where it is not the usual one.
    """
    if os.path.exists(model):
        return model
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except (ImportError, ValueError):  # the latter: no name of a repository
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def commit_of(directory: str) -> str | None:
    """The commit whose files a directory of Hugging Face's cache holds; None for other directories."""
    path = Path(directory)
    named = path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name)
    return path.name if named else None


def _parts(file: Path) -> Iterator[bytes]:
    """What is read of one file."""
    if file.suffix in _CODE:
        yield file.read_bytes()
        return
    with file.open("rb", buffering=0) as stream:
        if file.suffix == ".safetensors":
            yield from _of_tensors(stream)
        else:
            yield from _at_even_distances(stream)


def _of_tensors(stream: BinaryIO) -> Iterator[bytes]:
    length = int.from_bytes(_read(stream, 0, 8), "little")
    if not 0 < length <= _MOST_HEADER:
        raise ValueError(f"no header of safetensors: {length} bytes")
    header = _read(stream, 8, length)
    yield header
    tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
    for begin, end in sorted(tensors):
        size = min(_SAMPLE, end - begin)
        yield _read(stream, 8 + length + (begin + end - size) // 2, size)


def _at_even_distances(stream: BinaryIO) -> Iterator[bytes]:
    size = os.fstat(stream.fileno()).st_size
    sample = min(_SAMPLE, size)
    for index in range(_EVEN_SAMPLES):
        yield _read(stream, (size - sample) * index // (_EVEN_SAMPLES - 1), sample)


def _read(stream: BinaryIO, offset: int, size: int) -> bytes:
    data = os.pread(stream.fileno(), size, offset)
    if len(data) < size:
        raise ValueError(f"the file ends within {size} bytes at {offset}")
    return data
