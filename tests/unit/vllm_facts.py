"""Stand-ins for the configuration of an engine, of which tests of its identity change one thing at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore.namespace import Namespace
from kvstore_vllm.identity import Identity, identity_of, with_hash_seed

__all__ = [
    "CACHE",
    "ENVIRONMENT",
    "MODEL",
    "PARALLEL",
    "TENSORS",
    "Case",
    "Layer",
    "Setting",
    "draft",
    "interleave",
    "make_caches",
    "make_model",
    "make_offloading",
    "make_vllm",
    "set_groups",
    "set_hf",
    "set_layer",
    "set_path",
    "write_weights",
]

ENVIRONMENT = ("PYTHONHASHSEED", "VLLM_PP_LAYER_PARTITION", "VLLM_SSM_CONV_STATE_LAYOUT")
"""Variables that have a say in the identity."""
MODEL, CACHE, PARALLEL = "vllm.model_config", "vllm.cache_config", "offloading.parallel"
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
