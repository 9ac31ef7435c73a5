"""Keys are what they say: checked, made of content, or chained over token prefixes."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.keys import ChunkKey, check_keys, content_key, fingerprint_of, plain_fields, prefix_keys

TOKENS = st.lists(st.integers(0, 2**64 - 1), max_size=40)


def by_hand(tokens: Sequence[int], chunk: int, fields: dict[str, object], salt: bytes | None) -> list[bytes]:
    """The chain, from the documentation alone, with an incremental hash and ``struct``."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    seed = xxhash.xxh3_128(xxhash.xxh3_128(text).digest())
    seed.update(b"\0" if salt is None else b"\1" + salt)
    keys = [seed.digest()]
    for first in range(0, len(tokens) // chunk * chunk, chunk):
        link = xxhash.xxh3_128(keys[-1])
        for token in tokens[first : first + chunk]:
            link.update(struct.pack("<Q", token))
        keys.append(link.digest())
    return keys[1:]


def test_a_chunk_key_is_bytes() -> None:
    key = ChunkKey(bytes(range(16)))
    assert key == bytes(range(16))
    assert {key: 1}[bytes(range(16))] == 1
    assert key.hex() == "000102030405060708090a0b0c0d0e0f"
    assert type(ChunkKey.fromhex(key.hex())) is ChunkKey
    assert ChunkKey(bytearray(key)) == ChunkKey(memoryview(key)) == key


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda key: pickle.loads(pickle.dumps(key))])
def test_a_chunk_key_survives_copies(clone: object) -> None:
    key = ChunkKey(bytes(20))
    assert clone(key) == key  # type: ignore[operator]
    assert type(clone(key)) is ChunkKey  # type: ignore[operator]


@pytest.mark.parametrize("length", [0, 15, 65])
def test_wrong_lengths_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"has {length} bytes; keys have 16 to 64"):
        ChunkKey(bytes(length))
    with pytest.raises(ConfigError, match=f"key 2 has {length} bytes"):
        check_keys([bytes(16), bytes(64), bytes(length)])
    with pytest.raises(ConfigError, match=f"key 0 has {length} bytes"):
        check_keys([bytes(length)] * 3)


@pytest.mark.parametrize("wrong", ["0123456789abcdef", 16, None, [1] * 16])
def test_a_chunk_key_is_made_of_bytes_only(wrong: object) -> None:
    with pytest.raises(TypeError):
        ChunkKey(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["0123456789abcdef", 16, None, bytearray(16), memoryview(bytes(16))])
def test_a_batch_holds_bytes_only(wrong: object) -> None:
    with pytest.raises(TypeError, match=f"key 1 must be bytes, not {type(wrong).__name__}"):
        check_keys([bytes(16), wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="key 0 must be bytes"):
        check_keys([wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("single", [bytes(16), bytearray(16), "0123456789abcdef", memoryview(bytes(16))])
def test_one_key_is_no_batch(single: object) -> None:
    with pytest.raises(TypeError, match="not one"):
        check_keys(single)  # type: ignore[arg-type]


@given(st.lists(st.binary(min_size=16, max_size=64) | st.binary(min_size=16, max_size=64).map(ChunkKey)))
def test_good_batches_come_back_as_a_new_list(keys: list[bytes]) -> None:
    checked = check_keys(keys)
    assert checked == keys
    assert checked is not keys
    assert check_keys(iter(keys)) == keys
    assert check_keys(dict.fromkeys(keys)) == list(dict.fromkeys(keys))


@given(st.binary(max_size=300))
def test_content_keys_are_digests(data: bytes) -> None:
    key = content_key(data)
    assert key == xxhash.xxh3_128(data).digest()
    assert content_key(memoryview(bytearray(data))) == content_key(np.frombuffer(data, np.uint8)) == key


def test_content_is_no_text() -> None:
    with pytest.raises(TypeError):
        content_key("text")  # type: ignore[arg-type]


@given(TOKENS, st.integers(1, 7), st.none() | st.binary(max_size=9))
def test_prefix_keys_are_the_documented_chain(tokens: list[int], chunk: int, salt: bytes | None) -> None:
    fields: dict[str, object] = {"model": "m", "layers": 2}
    keys = prefix_keys(tokens, chunk, fields, salt)
    assert keys == by_hand(tokens, chunk, fields, salt)
    assert all(type(key) is ChunkKey for key in keys)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_prefix_keys_agree_exactly_as_far_as_the_tokens(a: list[int], b: list[int], chunk: int) -> None:
    pairs = zip(prefix_keys(a, chunk), prefix_keys(b, chunk), strict=False)
    for index, (left, right) in enumerate(pairs, start=1):
        assert (left == right) == (a[: index * chunk] == b[: index * chunk])


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, ">i4"])
def test_the_type_of_the_token_array_does_not_matter(dtype: object) -> None:
    tokens = np.arange(20).astype(dtype)  # type: ignore[call-overload]
    assert prefix_keys(tokens, 4) == prefix_keys(list(range(20)), 4)
    assert prefix_keys(bytes(range(20)), 4) == prefix_keys(tokens, 4)
    assert prefix_keys(tokens[:0], 4) == prefix_keys([], 4) == []
    assert prefix_keys(tokens[::2], 4) == prefix_keys(list(range(0, 20, 2)), 4)


def test_what_seeds_a_chain_tells_chains_apart() -> None:
    tokens = [1, 2, 3, 4]
    seeds = [(None, None), (None, b""), (None, "a"), ({"m": 1}, None), ({"m": 1}, "a"), ({"m": 1.0}, None)]
    keys = {prefix_keys(tokens, 4, namespace, extra)[0] for namespace, extra in seeds}
    assert len(keys) == len(seeds)
    assert prefix_keys(tokens, 4, {}, "é") == prefix_keys(tokens, 4, None, "é".encode())


@pytest.mark.parametrize(
    ("tokens", "chunk", "error", "message"),
    [
        ([1, 2], 0, ConfigError, "at least 1"),
        ([1, -2], 1, ConfigError, "is negative"),
        ([2**64], 1, ConfigError, "64 bits"),
        (np.array([1, -2]), 1, ConfigError, "is negative: -2"),
        ([1.0, 2.0], 1, TypeError, "integer"),
        (np.array([1.0]), 1, TypeError, "one row of integers"),
        (np.array([True]), 1, TypeError, "one row of integers"),
        ([[1, 2], [3, 4]], 1, TypeError, "integer"),
        (np.array([[1, 2], [3, 4]]), 1, TypeError, "2 dimensions"),
        ("ab", 1, TypeError, "integer"),
        ([None], 1, TypeError, "integer"),
    ],
)
def test_wrong_tokens_are_refused(
    tokens: list[int], chunk: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prefix_keys(tokens, chunk)


def test_plain_fields_are_what_json_gives_back() -> None:
    class Precision(StrEnum):
        HALF = "bfloat16"

    fields = {"d": Precision.HALF, "t": (1, (2.5,)), "m": {"x": None}, "f": np.float64(0.1), "b": True}
    plain = plain_fields(fields)
    assert (
        plain
        == json.loads(json.dumps(fields))
        == {"d": "bfloat16", "t": [1, [2.5]], "m": {"x": None}, "f": 0.1, "b": True}
    )
    assert type(plain["d"]) is str
    assert type(plain["f"]) is float


def test_types_of_values_count() -> None:
    values = [1, 1.0, True, "1", None, "null", [1], {"1": 1}, 0, 0.0, False, -0.0, ""]
    assert len({fingerprint_of({"x": value}) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"a": b"x"}, r"namespace\.a.* is bytes"),
        ({"a": {"b": [1, float("nan")]}}, r"namespace\.a\.b\[1\].* is nan"),
        ({"a": np.int64(3)}, r"namespace\.a.* is int64"),
        ({"a": {1}}, r"namespace\.a.* is set"),
        ({"a": {1: 2}}, r"namespace\.a: field names are strings, not 1"),
        ({1: 2}, "namespace: field names are strings, not 1"),
        ([1], "must be a mapping of fields, not list"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(fields: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        fingerprint_of(fields)
