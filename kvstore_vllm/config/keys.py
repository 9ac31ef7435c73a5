"""The keys of ``kv_connector_extra_config`` and of its tiers, as data.

Everything that knows a key by name reads these tables: parsing, defaults, messages, the documentation.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvstore.config import OPTIONS, SETTINGS, Option
from kvstore.config.kinds import TIMEOUT, Kind, choice, count
from kvstore.errors import ConfigError
from kvstore.units import parse_duration, parse_size

__all__ = ["KEYS", "TIER_KEYS", "TIER_TYPE", "check_names", "read"]

TIER_TYPE = "KVStoreTier"
"""Type of a tier of ours, in vLLM's list of secondary tiers."""

#: How alike an unknown key must be to a known one to be taken for a slip of the pen.
_TYPO = 0.8


def _parse_bytes(value: Any) -> int:
    """As :func:`kvstore.units.parse_size`; a float too, for ``--kv-offloading-size`` computes one."""
    if isinstance(value, float) and math.isfinite(value) and value >= 0:
        return int(value)
    return parse_size(value)


def _parse_flag(value: object) -> bool:
    """Booleans only: vLLM itself reads some of these keys, and takes the text "false" for true."""
    if not isinstance(value, bool):
        raise ValueError(f"neither true nor false: {value!r}; write it without quotes")
    return value


def _parse_share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"not a share above 0 and up to 1: {value!r}")
    return float(value)


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text, or an empty one")
    return value


def _parse_secret(value: object) -> str:
    """Text, which may be empty: the client then looks elsewhere. The value is in no message."""
    if not isinstance(value, str):
        raise ValueError(f"not a text but {type(value).__name__}")
    return value


def _parse_list(value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"not a list but {type(value).__name__}")
    return list(value)


def _parse_mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"not a mapping but {type(value).__name__}")
    return dict(value)


_BYTES = Kind(_parse_bytes, str, int)
_FLAG = Kind(_parse_flag, lambda value: "true" if value else "false", bool)
_SECONDS = Kind(parse_duration, str, float)
_SHARE = Kind(_parse_share, str, float)
_TEXT = Kind(_parse_text, str, str)
_SECRET = Kind(_parse_secret, str, str)
_LIST = Kind(_parse_list, str, list)
_MAPPING = Kind(_parse_mapping, str, dict)
_THREADS = count(1, 4096)
_MOST = 10**9 - 1


def _row(name: str, kind: Kind, default: Any, example: str, text: str) -> Option:
    return Option(name=name, kind=kind, default=default, example=example, help=text, tiers="store")


def _table(*rows: Option) -> dict[str, Option]:
    return {row.name: row for row in rows}


KEYS: dict[str, Option] = _table(
    _row(
        "tiers", _LIST, None, '["ram://?capacity=64GiB"]',
        "The host tier, then secondary tiers in order: URLs or mappings, as `kvstore.open` takes them.",
    ),
    _row(
        "cpu_bytes_to_use", _BYTES, None, "68719476736",
        "Bytes of host memory over all workers, instead of `tiers`; `--kv-offloading-size` sets it.",
    ),
    _row("host_cache_size", _BYTES, None, "68719476736", "The same, as TensorRT-LLM names it."),
    _row(
        "eviction_policy", choice("lru", "arc", "priority"), OPTIONS["policy"].default, "arc",
        "Which chunks leave host memory first; with `tiers`, `policy=` of `ram://` says it.",
    ),
    _row(
        "secondary_tiers", _LIST, None, '[{"type": "fs", "root_dir": "/mnt/kv"}]',
        "Tiers below host memory, as vLLM's own tiering takes them.",
    ),
    _row("block_size", count(1, _MOST), None, "64", "Tokens of a chunk; read by vLLM itself."),
    _row(
        "blocks_per_chunk", count(1, _MOST), None, "4",
        "Device blocks of a chunk, instead of `block_size`; read by vLLM itself.",
    ),
    _row(
        "offload_prompt_only", _FLAG, True, "false",
        "Whether only blocks of prompts are stored, not those of generated tokens.",
    ),
    _row(
        "self_describing_kv_events", _FLAG, False, "true",
        "Whether KV events of chunks carry token ids and parents.",
    ),
    _row(
        "canonical_layout", _FLAG, False, "true",
        "Whether chunks are laid out so that engines of other tensor-parallel sizes can read them.",
    ),
    _row(
        "store_threshold", count(0, _MOST), 0, "2",
        "How often a chunk must be offered before it is stored; below 2, always.",
    ),
    _row(
        "max_tracker_size", count(1, _MOST), 64_000, "100000",
        "Most chunks whose offers are counted for `store_threshold`.",
    ),
    _row(
        "secondary_offload_min_priority", count(0, 100), 35, "50",
        "Retention priority from which chunks are written below host memory.",
    ),
    _row(
        "lookup_timeout", TIMEOUT, 5.0, "2s",
        "How long a request may wait for chunks on their way up; then it runs with those that have come.",
    ),
    _row(
        "prefill_timeout", TIMEOUT, 30.0, "10s",
        "How long a request may wait for chunks that its `remote_prefiller` is computing.",
    ),
    _row(
        "promote_budget", _SHARE, 0.5, "0.25",
        "Share of host memory that chunks on their way up may take.",
    ),
    _row(
        "on_reset", choice("rekey", "keep"), "rekey", "keep",
        "What a reset of the prefix cache does to secondary tiers: nothing stored before is found again, "
        "or all of it is.",
    ),
    _row(
        "adapters", choice("private", "immutable"), "private", "immutable",
        "With LoRA: chunks are of use to this run only, or adapters of one name and path never change.",
    ),
    _row(
        "weights_id", _TEXT, None, "qwen3-8b-2025-05",
        "Names the content of the weights, where it cannot be told from their files.",
    ),
    dataclasses.replace(SETTINGS["engine"], default="processes", example="threads"),
    SETTINGS["nice"],
    SETTINGS["affinity"],
    _row("spec_name", _TEXT, None, "KVStoreOffloadingSpec", "Chooses this adapter; read by vLLM itself."),
    _row(
        "spec_module_path", _TEXT, None, "kvstore_vllm",
        "Where vLLM finds `spec_name`; may be left out where the plug-in is registered.",
    ),
    _row(
        "sync_load_budget_bytes", count(0, _MOST), 0, "67108864",
        "Most bytes for each worker that a step loads before it runs, instead of beside it; read by vLLM "
        "0.33 itself.",
    ),
    _row(
        "tier_poll_interval_s", _SECONDS, None, "0.01",
        "Has no effect: workers say when they are through.",
    ),
    _row(
        "cache_policy_module_path", _TEXT, None, "my_package.policies",
        "Has no effect: the policies are those of `eviction_policy`.",
    ),
    _row(
        "backpressure", _MAPPING, None, '{"backpressure_cls": "EMABackpressureDetector"}',
        "Has no effect: queues are bounded, and breakers act on errors and hangs.",
    ),
)  # fmt: skip

_COMMON = (
    _row("type", _TEXT, None, "fs", "Kind of the tier."),
    _row(
        "enable_kv_events", _FLAG, False, "true",
        "Whether KV events tell what the tier holds, where vLLM publishes events.",
    ),
    _row(
        "locality", choice("LOCAL", "REMOTE"), None, "REMOTE",
        "What KV events say about where the tier is.",
    ),
    _row("backpressure", _MAPPING, None, "{}", KEYS["backpressure"].help),
    _row(
        "module_path", _TEXT, None, "kvstore_vllm",
        "Where vLLM finds a type of others; here only `KVStoreTier` is one.",
    ),
)  # fmt: skip

_FS = (
    _row("root_dir", _TEXT, None, "/mnt/kv", "Directory; required."),
    _row(
        "n_read_threads", _THREADS, None, "16",
        "The larger of the two becomes `workers`, at most one for each CPU and 8 in all.",
    ),
    _row("n_write_threads", _THREADS, None, "16", "See `n_read_threads`."),
)  # fmt: skip

_OBJ = (
    _row(
        "store_config", _MAPPING, None, '{"bucket": "kv"}',
        "May hold the keys from `bucket` on, which may also stand beside it.",
    ),
    _row("prefix", _SECRET, "", "kv", "What names of objects begin with."),
    _row("io_threads", _THREADS, None, "16", "Becomes `concurrency`, requests of a worker at a time."),
    _row("bucket", _TEXT, None, "kv", "Bucket; required."),
    _row("endpoint_override", _SECRET, "", "10.0.0.1:9000", "Server, where it is not Amazon's."),
    _row("scheme", choice("http", "https"), "http", "https", "How `endpoint_override` is spoken to."),
    _row("access_key", _SECRET, "", "AKIA...", "With `secret_key`; else the client looks for credentials."),
    _row("secret_key", _SECRET, "", "...", "See `access_key`."),
    _row("session_token", _SECRET, "", "...", "Of temporary credentials."),
    _row("region", _SECRET, "", "eu-central-1", "Region of the bucket."),
    _row("ca_bundle", _SECRET, "", "/etc/ssl/ca.pem", "Certificates that the server's is checked against."),
)  # fmt: skip

_P2P = (
    _row(
        "host", _TEXT, None, "10.0.0.1",
        "Address that this instance binds; `VLLM_P2P_SIDE_CHANNEL_HOST` or `localhost`.",
    ),
    _row(
        "port", count(1, 65535), None, "5710",
        "Its port, to which the data-parallel index is added; `VLLM_P2P_SIDE_CHANNEL_PORT` or 5710.",
    ),
    _row(
        "storage_options", _MAPPING, None, '{"token": "..."}',
        "What peers have to prove: a token, or keys of CurveZMQ.",
    ),
    OPTIONS["allow"],
    OPTIONS["peers"],
    OPTIONS["transport"],
    _row("backends", _LIST, None, '["UCX"]', "Has no effect: `transport` says how chunks travel."),
    _row("num_threads", _THREADS, None, "8", "Has no effect, as `backends`."),
    _row(
        "unbound_store_timeout_s", TIMEOUT, None, "60",
        "Has no effect: chunks stay in host memory as all others do.",
    ),
)  # fmt: skip

_OWN = (
    _row("url", _TEXT, None, "s3://bucket/kv", "Where the tier is; its options may stand beside it."),
    _row("storage_options", _MAPPING, None, '{"endpoint_url": "..."}', "Arguments of its filesystem."),
)

TIER_KEYS: dict[str, dict[str, Option]] = {
    "fs": _table(*_COMMON, *_FS),
    "obj": _table(*_COMMON, *_OBJ),
    "p2p": _table(*_COMMON, *_P2P),
    TIER_TYPE: _table(*_COMMON, *_OWN),
}


def check_names(names: Iterable[object], known: Iterable[str], where: str) -> tuple[str, ...]:
    """Warnings about `names` that are not `known`; values are never repeated.

    Raises
    ------
    ConfigError
        One is so close to a known name that it must be a slip.
    """
    valid = list(known)
    warnings = []
    for name in names:
        if name in valid:
            continue
        text = str(name)
        close = difflib.get_close_matches(text.lower().replace("-", "_"), valid, n=1, cutoff=_TYPO)
        if close:
            raise ConfigError(f"{where}: unknown key {text!r}; did you mean {close[0]!r}?")
        warnings.append(f"{where}: unknown key {text!r} is ignored")
    return tuple(warnings)


def read(values: Mapping[str, Any], keys: Mapping[str, Option], where: str) -> dict[str, Any]:
    """The value of each of `keys`, parsed; its default where `values` has none, or a null.

    Raises
    ------
    ConfigError
        A value is not valid.
    """
    return {
        name: key.default if values.get(name) is None else key.parse(values[name], where)
        for name, key in keys.items()
    }
