"""What makes the bytes of one engine those of another: the fields of the namespace.

Whatever changes the content or the arrangement of a chunk under one and the same key is a field. Fields come
from vLLM's configuration, from the layers of the model and from the files of its weights; workers collect
them, and the scheduler adds what only it knows. What cannot be established makes the namespace private to
the run: such a run misses what others have stored, and never reads what may not be its own.

The reasons for each field: ``docs/explanation/vllm-identity.md``.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ._facts import Facts, Unrepresentable, plain
from .config import AdapterConfig, parse
from .weights import commit_of, fingerprint, local_directory

__all__ = ["Identity", "identity_of", "with_hash_seed"]

_MODEL_FIELDS = {
    "model_dtype": "dtype",
    "model_impl": "model_impl",
    "model_classes": "model_class_overrides",
    "quantization": "quantization",
    "quantization_config": "quantization_config",
    "disable_sliding_window": "disable_sliding_window",
}
_CACHE_FIELDS = {
    "hash_algorithm": "prefix_caching_hash_algo",
    "kv_dtype_skip_layers": "kv_cache_dtype_skip_layers",
    "sliding_window": "sliding_window",
    "mamba_block_size": "mamba_block_size",
    "mamba_dtype": "mamba_cache_dtype",
    "mamba_mode": "mamba_cache_mode",
    "mamba_page_size": "mamba_page_size_padded",
    "mamba_replay": "use_replayssm",
    "mamba_ssm_dtype": "mamba_ssm_cache_dtype",
}
_DRAFT_FIELDS = {
    "method": "method",
    "parallel": "parallel_drafting",
    "tokens": "num_speculative_tokens",
}
_PARALLEL_FIELDS = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
#: Variables of the environment that rearrange what a block holds.
_ENVIRONMENT = (
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)
#: Fields of a model's configuration that say where it came from, not what it computes.
_PROVENANCE = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
#: Algorithms of block hashes whose seed vLLM fixes where nobody else does.
_SEEDED = frozenset({"sha256", "sha256_cbor"})
_SET_WEIGHTS_ID = "set weights_id to a name of their content"
_SET_SEED = "set PYTHONHASHSEED to one value for all instances"
_SET_ADAPTERS = "set adapters=immutable if an adapter of one name and path never changes"


@dataclass(frozen=True)
class Identity:
    """Identity of what an engine stores, the same on all of its ranks.

    Attributes
    ----------
    fields : dict
        Plain JSON values. After :func:`with_hash_seed` they are the fields of the namespace.
    unknown : tuple of str
        What could not be established, each with what to set.
    """

    fields: dict[str, Any]
    unknown: tuple[str, ...] = ()

    @property
    def private(self) -> bool:
        """Whether what is stored is of use to this run only."""
        return bool(self.unknown)

    @property
    def warning(self) -> str:
        """One line for whoever runs the engine; empty unless :attr:`private`."""
        if not self.unknown:
            return ""
        return f"what this engine stores is of use to this run only: {'; '.join(self.unknown)}"


def identity_of(
    vllm_config: Any,
    offloading_config: Any,
    *,
    kv_caches: Any = None,
    attention: Any = None,
    version: str | None = None,
) -> Identity:
    """Identity of the bytes that a worker of this engine stores, without the seed of the hashes.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
    offloading_config : vllm.v1.kv_offload.config.OffloadingConfig
    kv_caches : vllm.v1.kv_offload.base.CanonicalKVCaches, optional
        Of this worker. Without them no canonical layout counts as free of ranks.
    attention : JSON value, optional
        How the layers arrange a block; by default the layers are asked, which exist once the worker's
        caches do.
    version : str, optional
        Of vLLM; by default that of the one installed.

    Returns
    -------
    Identity
        Equal on all ranks; nothing in it is random.
    """
    config = parse(offloading_config.extra_config)
    facts = Facts()
    facts.add("engine", lambda: f"vllm {_release(version or _installed_version())}")
    _add_model(facts, vllm_config, config)
    for name, attribute in _CACHE_FIELDS.items():
        facts.add(name, partial(getattr, vllm_config.cache_config, attribute))
    facts.add("model_runner_v2", lambda: bool(vllm_config.use_v2_model_runner))
    facts.add("draft", lambda: _draft(facts, vllm_config, config))
    _add_layout(facts, vllm_config, offloading_config, kv_caches)
    groups = offloading_config.groups
    facts.add("attention", lambda: _attention(vllm_config, groups) if attention is None else attention)
    facts.fields["environment"] = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    if getattr(vllm_config, "lora_config", None) is not None and config.adapters == "private":
        facts.unknown.append(f"the content of LoRA adapters ({_SET_ADAPTERS})")
    return Identity(facts.fields, tuple(facts.unknown))


def with_hash_seed(identity: Identity) -> Identity:
    """`identity` with what the scheduler adds: the seed of the hashes and, if private, a random ``run``.

    The seed itself stays secret, since with some algorithms collisions can be made by those who know it; the
    field is a digest of it.
    """
    fields = dict(identity.fields)
    unknown = identity.unknown
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        fields["hash_seed"] = hashlib.sha256(seed.encode()).hexdigest()[:32]
    elif fields.get("hash_algorithm") in _SEEDED:
        fields["hash_seed"] = "default"
    else:
        unknown += (f"the seed of the block hashes ({_SET_SEED})",)
    if unknown:
        fields["run"] = secrets.token_hex(16)
    return replace(identity, fields=fields, unknown=unknown)


def _installed_version() -> str:
    from vllm.version import __version__

    return str(__version__)


def _release(version: str) -> str:
    """Major and minor number: within them, vLLM does not rearrange what blocks hold."""
    match = re.match(r"(\d+\.\d+)\.", version)
    if match is None:
        raise Unrepresentable(f"not a release: {version!r}")
    return match[1]


def _add_model(facts: Facts, vllm_config: Any, config: AdapterConfig) -> None:
    model = vllm_config.model_config
    facts.add("weights", lambda: _weights(model, vllm_config.load_config, config), _SET_WEIGHTS_ID)
    facts.add("model", lambda: _model_fields(model))
    for name, attribute in _MODEL_FIELDS.items():
        facts.add(name, partial(getattr, model, attribute))
    facts.add("multimodal", lambda: _multimodal(model))


def _weights(model: Any, load_config: Any, config: AdapterConfig) -> Any:
    if config.weights_id is not None:
        return {"id": config.weights_id}
    if load_config.load_format == "dummy":
        raise Unrepresentable("they are random")
    if model.model_weights:
        raise Unrepresentable("they are not loaded from files of this machine")
    directory = local_directory(model.model, model.revision, load_config.download_dir)
    if directory is None:
        raise Unrepresentable(f"no files of {model.model!r} on this machine")
    commit = commit_of(directory)
    return {"files": fingerprint(directory), **({"commit": commit} if commit else {})}


def _model_fields(model: Any) -> dict[str, Any]:
    """The model's configuration; the length limit only where it chooses the rotary embedding."""
    fields = _without_provenance(plain(model.hf_config))
    if "longrope" in _rope_types(fields):
        fields["max_model_len"] = model.max_model_len
    return dict(fields)


def _without_provenance(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_provenance(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_provenance(item) for name, item in value.items() if name not in _PROVENANCE}


def _rope_types(value: Any) -> Iterator[str]:
    """Kinds of rotary embeddings, wherever in a model's configuration they are named."""
    if isinstance(value, list):
        for item in value:
            yield from _rope_types(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in ("rope_type", "type") and isinstance(item, str):
                yield {"su": "longrope"}.get(item, item)
            yield from _rope_types(item)


def _multimodal(model: Any) -> Any:
    config = getattr(model, "multimodal_config", None)
    return None if config is None else [config.mm_processor_kwargs, config.video_pruning_rate]


def _draft(facts: Facts, vllm_config: Any, config: AdapterConfig) -> Any:
    """The model that drafts tokens: its layers may have blocks in the cache too."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    fields = {name: getattr(speculative, attribute) for name, attribute in _DRAFT_FIELDS.items()}
    model = speculative.draft_model_config
    if model is not None:
        load_config = speculative.draft_load_config or vllm_config.load_config
        facts.add("draft_weights", lambda: _weights(model, load_config, config), _SET_WEIGHTS_ID)
        fields["model"] = _model_fields(model)
        fields["dtype"] = model.dtype
        fields["quantization"] = model.quantization
    return fields


def _add_layout(facts: Facts, vllm_config: Any, offloading: Any, kv_caches: Any) -> None:
    """How the bytes of a chunk are arranged: over layers, tokens and ranks."""
    parallel = offloading.parallel
    portable = _portable(offloading, kv_caches)
    facts.fields["kv_dtype"] = offloading.model.dtype
    facts.add("kv_layout", lambda: _known(offloading.kv_cache_layout))
    facts.fields["tokens_per_hash"] = offloading.cache.tokens_per_hash
    facts.fields["blocks_per_chunk"] = offloading.cache.blocks_per_chunk
    # With pipeline stages each rank sees its own layers only; which, follows from the other fields.
    whole = parallel.pp_size == 1
    facts.fields["groups"] = [
        [group.tokens_per_block, *(group.layer_names if whole else ())] for group in offloading.groups
    ]
    facts.fields["canonical"] = bool(offloading.canonical_layout)
    facts.fields["replicated"] = bool(offloading.replicated_layout)
    ranks = {name: getattr(parallel, name) for name in _PARALLEL_FIELDS}
    facts.fields["ranks"] = "any" if portable else ranks
    if whole and kv_caches is not None:
        facts.add("pages", partial(_pages, kv_caches, portable))
    if parallel.pcp_size * parallel.dcp_size > 1:
        facts.add("interleave", lambda: vllm_config.parallel_config.cp_kv_cache_interleave_size)


def _portable(offloading: Any, kv_caches: Any) -> bool:
    """Whether chunks do not depend on the number of ranks; every layer must say so."""
    if not (offloading.canonical_layout and offloading.parallel.is_parallelism_agnostic and kv_caches):
        return False
    mappings = [ref.mapping for group in kv_caches.group_data_refs for ref in group]
    return bool(mappings) and all(mapping and mapping.parallelism_agnostic for mapping in mappings)


def _pages(kv_caches: Any, portable: bool) -> list[Any]:
    """For each group, the parts of a block in the order in which a chunk has them."""
    groups = kv_caches.group_data_refs
    if portable:
        return [[ref.mapping.canonical_page_size_bytes for ref in group] for group in groups]
    sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
    return [
        [[ref.tensor_idx, ref.page_size_bytes, sizes[ref.tensor_idx]] for ref in group] for group in groups
    ]


def _known(value: Any) -> Any:
    if value is None:
        raise Unrepresentable("not settled")
    return value


def _attention(vllm_config: Any, groups: Any) -> list[list[str]]:
    """For each group, what its layers say of how they arrange a block."""
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    return [sorted({_describe(layers[name]) for name in group.layer_names}) for group in groups]


def _describe(layer: Any) -> str:
    backend = layer.get_attn_backend().get_name()
    packing = getattr(layer, "isa", None)  # on a CPU keys are packed for its instructions
    if backend == "CPU_ATTN" and packing is None:
        raise Unrepresentable("the packing of CPU_ATTN")
    return " ".join(filter(None, (backend, packing, getattr(layer, "kv_cache_dtype", None))))
