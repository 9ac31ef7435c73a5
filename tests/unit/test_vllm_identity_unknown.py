"""Identity of an engine: what is unknown makes it private, and the warning says what would help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_facts import (
    CACHE,
    ENVIRONMENT,
    MODEL,
    Case,
    Layer,
    Setting,
    draft,
    make_caches,
    make_offloading,
    make_vllm,
    set_hf,
    set_layer,
    set_path,
)

from kvstore_vllm.identity import identity_of


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return Case(make_vllm(tmp_path / "model"), make_offloading(), make_caches(None))


def gone(path: str) -> Callable[[Case], None]:
    *owners, last = path.split(".")

    def change(case: Case) -> None:
        owner: Any = case
        for name in owners:
            owner = getattr(owner, name)
        delattr(owner, last)

    return change


def no_weights(case: Case) -> None:
    (Path(case.vllm.model_config.model) / "model.safetensors").unlink()


def torn_weights(case: Case) -> None:
    path = Path(case.vllm.model_config.model) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9000])


UNKNOWN: dict[str, tuple[Callable[[Case], None], str]] = {
    "no weights": (no_weights, "weights_id"),
    "torn weights": (torn_weights, "weights_id"),
    "random weights": (set_path("vllm.load_config.load_format", "dummy"), "weights_id"),
    "remote weights": (set_path(f"{MODEL}.model_weights", "s3://b/m"), "weights_id"),
    "model elsewhere": (set_path(f"{MODEL}.model", "/nowhere/at all"), "weights_id"),
    "adapters": (set_path("vllm.lora_config", object()), "adapters=immutable"),
    "random seed": (set_path(f"{CACHE}.prefix_caching_hash_algo", "xxhash"), "PYTHONHASHSEED"),
    "no such setting": (gone(f"{CACHE}.mamba_cache_mode"), "mamba_mode"),
    "a value without a text": (set_hf(strange=object()), "model"),
    "a long story": (set_path(f"{MODEL}.model", "two\nlines"), "weights_id"),
    "layout not settled": (set_path("offloading.kv_cache_layout", None), "kv_layout"),
    "packing": (set_layer(Layer(isa=None)), "attention"),
    "layers": (set_path("vllm.compilation_config.static_forward_context", {}), "attention"),
    "version": (set_path("version", "dev"), "engine"),
}


@pytest.mark.parametrize(("change", "word"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_is_unknown_makes_it_private(case: Case, change: Callable[[Case], None], word: str) -> None:
    change(case)
    identity = case.identity()
    assert identity.private
    assert len(identity.unknown) == 1
    assert word in identity.warning
    assert "\n" not in identity.warning
    assert case.fingerprint != case.fingerprint  # each run has a namespace of its own


def test_workers_agree_about_what_is_unknown(case: Case) -> None:
    case.vllm.lora_config = object()
    first = identity_of(case.vllm, case.offloading, version="0.32.0")
    assert first == identity_of(case.vllm, case.offloading, version="0.32.0")
    assert "run" not in first.fields


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        (set_path("vllm.load_config.load_format", "dummy"), {"weights_id": "v1"}),
        (no_weights, {"weights_id": "v1"}),
        (set_path("vllm.lora_config", object()), {"adapters": "immutable"}),
    ],
    ids=["dummy", "no weights", "adapters"],
)
def test_what_the_warning_says_helps(
    case: Case, change: Callable[[Case], None], setting: dict[str, Any]
) -> None:
    change(case)
    case.offloading.extra_config.update(setting)
    assert not case.identity().private
    assert case.fingerprint == case.fingerprint


def test_seed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    default = case.fingerprint
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    identity = case.identity()
    assert case.fingerprint != default
    assert "12345" not in json.dumps(identity.fields)
    case.vllm.cache_config.prefix_caching_hash_algo = "xxhash"
    assert not case.identity().private


def test_draft_model_counts(case: Case) -> None:
    draft(case)
    before = case.fingerprint
    case.vllm.speculative_config.draft_model_config.hf_config.fields["hidden_size"] = 1
    assert case.fingerprint != before
    case.vllm.speculative_config.draft_load_config = Setting(load_format="dummy", download_dir=None)
    assert case.identity().private
