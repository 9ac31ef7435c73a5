"""Identity of an engine: every field counts, what is unknown makes it private, and ranks agree."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.namespace import Namespace
from kvstore_vllm._facts import Unrepresentable, plain
from kvstore_vllm.identity import Identity, identity_of, with_hash_seed
from kvstore_vllm.weights import commit_of, fingerprint, local_directory

HOST = {"tiers": ["ram://?capacity=1GiB"]}
TENSORS = {"embed": 4096, "layers.0.q": 9000, "layers.0.k": 16}


class Setting(SimpleNamespace):
    """Stands for one of vLLM's configuration objects."""


class HFConfig:
    """Stands for the configuration of a model, as transformers has it."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


class Layer:
    """Stands for an attention layer."""

    kv_cache_dtype = "auto"

    def __init__(self, backend: str = "CPU_ATTN", isa: str | None = "vec") -> None:
        self.backend = backend
        self.isa = isa

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend)


def write_weights(directory: Path, value: int = 1, tensors: dict[str, int] = TENSORS) -> Path:
    """A file of safetensors, every byte of it `value`."""
    directory.mkdir(parents=True, exist_ok=True)
    offset, header = 0, {}
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes([value]) * offset)
    return path


def make_model(directory: Path, **hf: Any) -> Setting:
    fields = {"_name_or_path": str(directory), "transformers_version": "5", "hidden_size": 64, **hf}
    return Setting(
        model=str(directory), model_weights="", revision=None, hf_config=HFConfig(**fields), dtype="float32",
        model_impl="auto", model_class_overrides={}, quantization=None, quantization_config=None,
        disable_sliding_window=False, max_model_len=768,
    )  # fmt: skip


def make_vllm(directory: Path, **hf: Any) -> Setting:
    write_weights(directory)
    cache = Setting(
        prefix_caching_hash_algo="sha256", kv_cache_dtype_skip_layers=[], sliding_window=None,
        mamba_block_size=None, mamba_cache_dtype="auto", mamba_cache_mode="none", mamba_page_size_padded=None,
        use_replayssm=False, mamba_ssm_cache_dtype="auto",
    )  # fmt: skip
    return Setting(
        model_config=make_model(directory, **hf),
        cache_config=cache,
        load_config=Setting(load_format="auto", download_dir=None),
        parallel_config=Setting(cp_kv_cache_interleave_size=1),
        compilation_config=Setting(static_forward_context={"layers.0": Layer(), "layers.1": Layer()}),
        speculative_config=None,
        lora_config=None,
        use_v2_model_runner=False,
    )


def make_offloading(**extra: Any) -> Setting:
    parallel = Setting(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False
    )
    return Setting(
        groups=(Setting(tokens_per_block=32, layer_names=("layers.0", "layers.1"), group_id=0),),
        extra_config={**HOST, **extra},
        model=Setting(name="m", dtype="float32"),
        cache=Setting(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )


def make_caches(portable: bool | None, page: int = 4096) -> Setting:
    """Two layers; `portable` is what their canonical mappings say, None is no mapping."""
    mapping = None
    if portable is not None:
        mapping = Setting(parallelism_agnostic=portable, canonical_page_size_bytes=4096)
    refs = [Setting(tensor_idx=index, page_size_bytes=page, mapping=mapping) for index in (0, 1)]
    return Setting(tensors=[Setting(page_size_bytes=page)] * 2, group_data_refs=[refs])


@dataclass
class Case:
    """Configuration of an engine, to be changed at will."""

    vllm: Setting
    offloading: Setting
    caches: Setting | None = None
    version: str = "0.32.0"

    def identity(self) -> Identity:
        found = identity_of(self.vllm, self.offloading, kv_caches=self.caches, version=self.version)
        return with_hash_seed(found)

    @property
    def fingerprint(self) -> bytes:
        return Namespace(self.identity().fields, 4096).fingerprint


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    for name in ("PYTHONHASHSEED", "VLLM_PP_LAYER_PARTITION", "VLLM_SSM_CONV_STATE_LAYOUT"):
        monkeypatch.delenv(name, raising=False)
    return Case(make_vllm(tmp_path / "model"), make_offloading(), make_caches(None))


def set_path(root: str, value: Any) -> Callable[[Case], None]:
    """Sets an attribute, named by its path from the case."""
    *path, last = root.split(".")

    def change(case: Case) -> None:
        owner: Any = case
        for name in path:
            owner = getattr(owner, name)
        setattr(owner, last, value)

    return change


def set_hf(**fields: Any) -> Callable[[Case], None]:
    return lambda case: case.vllm.model_config.hf_config.fields.update(fields)


def set_layer(layer: Layer) -> Callable[[Case], None]:
    return lambda case: case.vllm.compilation_config.static_forward_context.update({"layers.1": layer})


def set_groups(*groups: tuple[int, tuple[str, ...]]) -> Callable[[Case], None]:
    return set_path(
        "offloading.groups",
        tuple(Setting(tokens_per_block=size, layer_names=names) for size, names in groups),
    )


def draft(case: Case) -> None:
    case.vllm.speculative_config = Setting(
        method="eagle", parallel_drafting=False, num_speculative_tokens=2, draft_load_config=None,
        draft_model_config=make_model(Path(case.vllm.model_config.model)),
    )  # fmt: skip


def interleave(size: int) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.offloading.parallel.dcp_size = 2
        case.vllm.parallel_config.cp_kv_cache_interleave_size = size

    return change


MODEL, CACHE, PARALLEL = "vllm.model_config", "vllm.cache_config", "offloading.parallel"
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


# What is unknown


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


def test_identity_travels(case: Case) -> None:
    identity = case.identity()
    assert msgspec.json.decode(msgspec.json.encode(identity), type=Identity) == identity


# Weights


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
