"""Identity of engines as vLLM itself configures them: nothing of a usual model is unknown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_engines import make_model
from vllm.engine.arg_utils import EngineArgs

from kvstore.namespace import Namespace
from kvstore_vllm.identity import Identity, identity_of, with_hash_seed


def configuration(model: Path, **options: Any) -> Any:
    """vLLM's configuration for a model."""
    given = {"model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 768}
    return EngineArgs(**{**given, **options}).create_engine_config()


def identity(vllm_config: Any, **extra: Any) -> Identity:
    """Its identity, with a layout that an engine would have made out of it."""
    ranks = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    offloading = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=32, layer_names=("model.layers.0.self_attn.attn",)),),
        extra_config={"tiers": ["ram://?capacity=1GiB"], **extra},
        model=SimpleNamespace(dtype=str(vllm_config.model_config.dtype).removeprefix("torch.")),
        cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=SimpleNamespace(rank=0, is_parallelism_agnostic=False, **ranks),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )
    return with_hash_seed(identity_of(vllm_config, offloading, attention=[["CPU_ATTN vec auto"]]))


def fingerprint(vllm_config: Any) -> bytes:
    return Namespace(identity(vllm_config).fields, 4096).fingerprint


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def test_a_usual_model_is_known_in_full(llama: Path) -> None:
    found = identity(configuration(llama))
    assert found.unknown == ()
    assert found.fields["engine"].startswith("vllm 0.")
    assert found.fields["model"]["hidden_size"] == 128
    assert found.fields["model_dtype"] == "float32"


def test_equal_configurations_share(llama: Path) -> None:
    assert fingerprint(configuration(llama)) == fingerprint(configuration(llama, max_model_len=512))


def test_a_model_of_other_weights_does_not(llama: Path, tmp_path: Path) -> None:
    other = make_model("llama", tmp_path / "other", seed=1)
    again = make_model("llama", tmp_path / "again", seed=0)
    assert fingerprint(configuration(other)) != fingerprint(configuration(llama))
    assert fingerprint(configuration(again)) == fingerprint(configuration(llama))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_engine_count(llama: Path, options: dict[str, Any]) -> None:
    found = identity(configuration(llama, **options))
    assert found.unknown == ()
    assert Namespace(found.fields, 4096).fingerprint != fingerprint(configuration(llama))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"load_format": "dummy"}, "weights_id"),
        ({"prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED"),
        ({"enable_lora": True}, "adapters=immutable"),
    ],
    ids=["dummy", "xxhash", "lora"],
)
def test_what_vllm_leaves_open_makes_a_run_private(llama: Path, options: dict[str, Any], word: str) -> None:
    found = identity(configuration(llama, **options))
    assert len(found.unknown) == 1
    assert word in found.warning
