"""Identity of an engine: every field counts, and ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import msgspec
import pytest
from vllm_facts import (
    CACHE,
    ENVIRONMENT,
    MODEL,
    PARALLEL,
    Case,
    Layer,
    Setting,
    draft,
    interleave,
    make_caches,
    make_offloading,
    make_vllm,
    set_groups,
    set_hf,
    set_layer,
    set_path,
    write_weights,
)

from kvstore_vllm.identity import Identity


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return Case(make_vllm(tmp_path / "model"), make_offloading(), make_caches(None))


CHANGES: dict[str, Callable[[Case], None]] = {
    "release of vLLM": set_path("version", "0.33.1"),
    "weights": lambda case: write_weights(Path(case.vllm.model_config.model), value=2) and None,
    "weights_id": lambda case: case.offloading.extra_config.update(weights_id="v2"),
    "model: number": set_hf(hidden_size=128),
    "model: nested": set_hf(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "model: nested value": set_hf(rope_parameters={"rope_type": "default", "rope_theta": 2e4}),
    "model: infinity": set_hf(time_step_limit=[0.0, float("inf")]),
    "model dtype": set_path(f"{MODEL}.dtype", "bfloat16"),
    "model implementation": set_path(f"{MODEL}.model_impl", "transformers"),
    "model classes": set_path(f"{MODEL}.model_class_overrides", {"a": "b"}),
    "quantization": set_path(f"{MODEL}.quantization", "fp8"),
    "online quantization": set_path(f"{MODEL}.quantization_config", {"bits": 4}),
    "no sliding window": set_path(f"{MODEL}.disable_sliding_window", True),
    "multimodal": set_path(
        f"{MODEL}.multimodal_config", Setting(mm_processor_kwargs={"size": 2}, video_pruning_rate=None)
    ),
    "hash algorithm": set_path(f"{CACHE}.prefix_caching_hash_algo", "sha256_cbor"),
    "skipped layers": set_path(f"{CACHE}.kv_cache_dtype_skip_layers", ["0"]),
    "sliding window": set_path(f"{CACHE}.sliding_window", 128),
    "mamba block": set_path(f"{CACHE}.mamba_block_size", 64),
    "mamba dtype": set_path(f"{CACHE}.mamba_cache_dtype", "float32"),
    "mamba mode": set_path(f"{CACHE}.mamba_cache_mode", "align"),
    "mamba page": set_path(f"{CACHE}.mamba_page_size_padded", 8192),
    "mamba replay": set_path(f"{CACHE}.use_replayssm", True),
    "mamba state": set_path(f"{CACHE}.mamba_ssm_cache_dtype", "float32"),
    "model runner": set_path("vllm.use_v2_model_runner", True),
    "attention backend": set_layer(Layer("FLASH_ATTN", None)),
    "attention packing": set_layer(Layer(isa="amx")),
    "draft model": draft,
    "kv dtype": set_path("offloading.model.dtype", "fp8"),
    "kv layout": set_path("offloading.kv_cache_layout", "LBNHC"),
    "tokens of a hash": set_path("offloading.cache.tokens_per_hash", 16),
    "blocks of a chunk": set_path("offloading.cache.blocks_per_chunk", 4),
    "tokens of a block": set_groups((64, ("layers.0", "layers.1"))),
    "order of layers": set_groups((32, ("layers.1", "layers.0"))),
    "groups": set_groups((32, ("layers.0",)), (32, ("layers.1",))),
    "pages": set_path("caches", make_caches(None, page=8192)),
    "canonical": set_path("offloading.canonical_layout", True),
    "replicated": set_path("offloading.replicated_layout", True),
    "world": set_path(f"{PARALLEL}.world_size", 2),
    "tensor parallel": set_path(f"{PARALLEL}.tp_size", 2),
    "pipeline stages": set_path(f"{PARALLEL}.pp_size", 2),
    "prefill context parallel": set_path(f"{PARALLEL}.pcp_size", 2),
    "decode context parallel": interleave(1),
    "interleaving": interleave(16),
}


def test_an_identity_that_is_known(case: Case) -> None:
    identity = case.identity()
    assert identity.unknown == ()
    assert identity.warning == ""
    assert not identity.private
    assert "run" not in identity.fields
    assert case.fingerprint == case.fingerprint


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_field_counts(case: Case, change: Callable[[Case], None]) -> None:
    before = case.fingerprint
    change(case)
    assert not case.identity().private
    assert case.fingerprint != before


def test_every_field_is_explained(case: Case) -> None:
    draft(case)
    interleave(16)(case)
    case.vllm.lora_config = object()
    page = Path(__file__).parents[2] / "docs" / "explanation" / "vllm-identity.md"
    explained = page.read_text(encoding="utf-8")
    assert not [name for name in case.identity().fields if f"`{name}`" not in explained]


def test_changes_differ_from_each_other(case: Case) -> None:
    found = {}
    for name, change in CHANGES.items():
        other = Case(deepcopy(case.vllm), deepcopy(case.offloading), case.caches)
        write_weights(Path(case.vllm.model_config.model))
        change(other)
        found[other.fingerprint] = name
    assert len(found) == len(CHANGES)


@pytest.mark.parametrize("name", ["VLLM_PP_LAYER_PARTITION", "VLLM_SSM_CONV_STATE_LAYOUT"])
def test_environment_counts(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = case.fingerprint
    monkeypatch.setenv(name, "DS")
    assert case.fingerprint != before


@pytest.mark.parametrize(
    "change",
    [
        set_path(f"{PARALLEL}.rank", 1),
        set_path(f"{MODEL}.max_model_len", 4096),
        set_path("version", "0.32.1rc1+cpu"),
        set_hf(_name_or_path="elsewhere", transformers_version="4", _commit_hash="c"),
        set_hf(sub={"_name_or_path": "elsewhere", "hidden": 1}),
    ],
    ids=["rank", "length limit", "patch", "provenance", "nested provenance"],
)
def test_what_does_not_count(case: Case, change: Callable[[Case], None]) -> None:
    set_hf(sub={"_name_or_path": "here", "hidden": 1})(case)
    before = case.fingerprint
    change(case)
    assert case.fingerprint == before


def test_a_copy_of_the_model_elsewhere_is_the_same(case: Case, tmp_path: Path) -> None:
    assert Case(make_vllm(tmp_path / "copy"), case.offloading, case.caches).fingerprint == case.fingerprint


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_length_limit_counts_where_it_chooses_the_embedding(case: Case, kind: str) -> None:
    set_hf(text_config={"rope_scaling": {"type": kind}})(case)
    before = case.fingerprint
    case.vllm.model_config.max_model_len = 4096
    assert case.fingerprint != before


# Ranks


def canonical(case: Case, size: int, portable: bool | None) -> Case:
    offloading = deepcopy(case.offloading)
    offloading.canonical_layout = offloading.parallel.is_parallelism_agnostic = True
    offloading.parallel.tp_size = offloading.parallel.world_size = size
    return Case(case.vllm, offloading, make_caches(portable, page=4096 // size))


def test_canonical_chunks_are_of_any_number_of_ranks(case: Case) -> None:
    assert canonical(case, 1, True).fingerprint == canonical(case, 2, True).fingerprint


@pytest.mark.parametrize("portable", [False, None], ids=["opaque", "no mapping"])
def test_layers_must_confirm_that_chunks_are_canonical(case: Case, portable: bool | None) -> None:
    assert canonical(case, 1, portable).fingerprint != canonical(case, 2, portable).fingerprint


def test_without_caches_nothing_is_free_of_ranks(case: Case) -> None:
    one, two = canonical(case, 1, True), canonical(case, 2, True)
    one.caches = two.caches = None
    assert one.fingerprint != two.fingerprint


def test_pipeline_stages_agree(case: Case) -> None:
    """Each sees its own layers only."""
    case.offloading.parallel.pp_size = 2
    first, second = deepcopy(case), deepcopy(case)
    set_groups((32, ("layers.0",)))(first)
    set_groups((32, ("layers.1",)))(second)
    assert first.fingerprint == second.fingerprint


def test_identity_travels(case: Case) -> None:
    identity = case.identity()
    assert msgspec.json.decode(msgspec.json.encode(identity), type=Identity) == identity
