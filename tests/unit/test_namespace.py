"""A namespace is its fields, whatever their order; a manifest that differs is refused with the difference."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, NamespaceMismatchError
from kvstore.keys import prefix_keys
from kvstore.namespace import ABSENT, Namespace

FIELDS = {"model": "Qwen/Qwen3-8B", "dtype": "bfloat16", "rope": {"factor": 1.0}, "shape": [8, 128]}
OWN = {"chunk_size", "format_version", "hash"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.text().filter(lambda name: name not in OWN), JSON, max_size=5)


def edited(namespace: Namespace, edit: Callable[[dict[str, Any]], None], resign: bool = True) -> bytes:
    """A manifest with changed fields, and a fingerprint that agrees with them or not."""
    content = json.loads(namespace.manifest)
    edit(content["fields"])
    if resign:
        canonical = json.dumps(content["fields"], sort_keys=True, separators=(",", ":")).encode()
        content["fingerprint"] = xxhash.xxh3_128(canonical).hexdigest()
    return json.dumps(content).encode()


def test_the_fingerprint_is_the_documented_digest() -> None:
    namespace = Namespace(FIELDS, chunk_size=4096)
    identity = {**FIELDS, "chunk_size": 4096, "format_version": 1, "hash": "xxh3-128"}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()
    assert namespace.fingerprint == xxhash.xxh3_128(canonical).digest()
    assert namespace.directory == namespace.fingerprint.hex()


@given(MAPPINGS, st.integers(1, 2**40), st.randoms())
def test_order_never_matters_and_manifests_lead_back(fields: dict[str, Any], size: int, random: Any) -> None:
    namespace = Namespace(fields, size)
    shuffled = list(fields.items())
    random.shuffle(shuffled)
    again = Namespace(dict(shuffled), size)
    assert again == namespace
    assert hash(again) == hash(namespace)
    again.check_manifest(namespace.manifest)
    assert Namespace.from_manifest(namespace.manifest) == namespace
    assert pickle.loads(pickle.dumps(namespace)) == namespace


@given(MAPPINGS, MAPPINGS)
def test_different_fields_are_different_namespaces(a: dict[str, Any], b: dict[str, Any]) -> None:
    same = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    assert (Namespace(a, 4096) == Namespace(b, 4096)) == same


def test_the_chunk_size_belongs_to_the_identity() -> None:
    assert Namespace(FIELDS, 4096) != Namespace(FIELDS, 8192)
    assert Namespace({"x": 1}, 4096) != Namespace({"x": True}, 4096)
    assert Namespace({}, 4096) != "something else"


def test_a_namespace_cannot_be_changed() -> None:
    fields = {"nested": {"a": 1}}
    namespace = Namespace(fields, 4096)
    before = namespace.fingerprint
    fields["nested"]["a"] = 2
    assert (
        Namespace({"nested": {"a": 1}}, 4096).fingerprint
        == before
        == Namespace(namespace.fields, 4096).fingerprint
    )
    with pytest.raises(TypeError):
        namespace.fields["model"] = "other"  # type: ignore[index]
    with pytest.raises(AttributeError):
        namespace.chunk_size = 1  # type: ignore[misc]


def test_a_namespace_seeds_prefix_keys() -> None:
    tokens = list(range(8))
    small, large = Namespace(FIELDS, 4096), Namespace(FIELDS, 8192)
    assert prefix_keys(tokens, 4, small) == prefix_keys(tokens, 4, Namespace(FIELDS, 4096))
    assert set(prefix_keys(tokens, 4, small)).isdisjoint(prefix_keys(tokens, 4, large))


@pytest.mark.parametrize("name", sorted(OWN))
def test_names_of_own_fields_are_reserved(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is kvstore's own"):
        Namespace({name: 1}, 4096)


@pytest.mark.parametrize("size", [0, -1, True, 4096.0, "4096"])
def test_the_chunk_size_is_a_positive_number(size: Any) -> None:
    with pytest.raises(ConfigError, match="chunk_size must be a positive number"):
        Namespace({}, size)


def test_the_manifest_is_readable_and_the_same_for_all() -> None:
    manifest = Namespace(FIELDS, 4096).manifest
    assert manifest == Namespace(dict(reversed(FIELDS.items())), 4096).manifest
    content = json.loads(manifest)
    assert content["fields"]["model"] == "Qwen/Qwen3-8B"
    assert content["created_by"].startswith("kvstore")
    assert len(manifest.splitlines()) > len(FIELDS)


def test_another_namespace_is_refused_with_the_differing_fields() -> None:
    stored = Namespace({"model": "a", "layers": 1, "old": None}, 4096)
    asked = Namespace({"model": "b", "layers": True, "new": "x\ny"}, 4096)
    with pytest.raises(NamespaceMismatchError) as caught:
        asked.check_manifest(stored.manifest)
    assert caught.value.differing == {
        "layers": (1, True),
        "model": ("a", "b"),
        "new": (ABSENT, "x\ny"),
        "old": (None, ABSENT),
    }
    message = str(caught.value)
    assert 'model: found "a", expected "b"' in message
    assert "layers: found 1, expected true" in message
    assert "\n" not in message


def test_messages_stay_short() -> None:
    many = {f"field-{i}": "x" * 1000 for i in range(50)}
    with pytest.raises(NamespaceMismatchError, match="and 44 more") as caught:
        Namespace({}, 4096).check_manifest(Namespace(many, 4096).manifest)
    assert len(caught.value.differing) == 50
    assert len(str(caught.value)) < 2000


@given(st.data())
def test_torn_manifests_are_refused(data: st.DataObject) -> None:
    namespace = Namespace(FIELDS, 4096)
    whole = namespace.manifest.rstrip()
    torn = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for read in (namespace.check_manifest, Namespace.from_manifest):
        with pytest.raises(NamespaceMismatchError, match="torn") as caught:
            read(torn)
        assert caught.value.differing["manifest"][0] == f"{len(torn)} bytes"


@pytest.mark.parametrize(
    "wrong",
    [
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe\x00",
        b'{"fields": 3, "fingerprint": ""}',
        b'{"fields": {"x": NaN}, "fingerprint": ""}',
        b"[" * 100_000,
    ],
    ids=range(7),
)
def test_what_is_no_manifest_is_refused(wrong: bytes) -> None:
    for read in (Namespace({}, 4096).check_manifest, Namespace.from_manifest):
        with pytest.raises(NamespaceMismatchError, match="no manifest"):
            read(wrong)


def test_an_edited_manifest_is_refused_even_by_those_who_ask_for_nothing() -> None:
    namespace = Namespace(FIELDS, 4096)
    forged = edited(namespace, lambda fields: fields.update(model="other"), resign=False)
    with pytest.raises(NamespaceMismatchError, match="fingerprint is not that of its own fields"):
        Namespace.from_manifest(forged)
    with pytest.raises(NamespaceMismatchError) as caught:
        namespace.check_manifest(forged)
    assert caught.value.differing["model"] == ("other", "Qwen/Qwen3-8B")
    assert caught.value.differing["fingerprint"][0] == namespace.directory
    with pytest.raises(NamespaceMismatchError, match="own fields"):
        Namespace({**FIELDS, "model": "other"}, 4096).check_manifest(forged)


@pytest.mark.parametrize(
    ("field", "value"), [("format_version", 2), ("hash", "md5"), ("chunk_size", 0), ("chunk_size", None)]
)
def test_manifests_of_other_formats_are_refused(field: str, value: object) -> None:
    manifest = edited(Namespace(FIELDS, 4096), lambda fields: fields.update({field: value}))
    with pytest.raises(NamespaceMismatchError) as caught:
        Namespace.from_manifest(manifest)
    assert caught.value.differing[field][0] == value
