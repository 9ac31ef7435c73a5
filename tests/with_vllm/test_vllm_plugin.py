"""vLLM finds the adapter by its names alone, as the entry point has registered them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import kvstore_vllm
from kvstore_vllm.plugin import register

SPEC = {"spec_name": "KVStoreOffloadingSpec"}
TIER = {"type": "KVStoreTier"}


def test_entry_point() -> None:
    [found] = entry_points(group="vllm.general_plugins", name="kvstore")
    assert found.load() is register


@pytest.mark.parametrize("times", [1, 2, 3])
def test_names_lead_to_the_classes(times: int) -> None:
    for _ in range(times):
        register()
    assert OffloadingSpecFactory.get_spec_cls(SPEC) is kvstore_vllm.KVStoreOffloadingSpec
    assert SecondaryTierFactory.get_tier_class(TIER) is kvstore_vllm.KVStoreTier


def test_paths_lead_to_the_same_classes() -> None:
    path = "kvstore_vllm"
    unregistered = {**SPEC, "spec_module_path": path}, {**TIER, "module_path": path}
    assert OffloadingSpecFactory.get_spec_cls(unregistered[0]) is kvstore_vllm.KVStoreOffloadingSpec
    assert SecondaryTierFactory.get_tier_class(unregistered[1]) is kvstore_vllm.KVStoreTier


def test_vllm_loads_the_plugin_in_a_process_of_its_own(tmp_path: Path) -> None:
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.v1.kv_offload.factory import OffloadingSpecFactory\n"
        f"print(OffloadingSpecFactory.get_spec_cls({SPEC!r}).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split()[-1:] == ["KVStoreOffloadingSpec"], done.stderr


def test_importing_the_package_loads_neither_vllm_nor_torch() -> None:
    code = "import sys, kvstore_vllm, kvstore_vllm.config, kvstore_vllm.plugin; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"vllm", "torch"} & set(done.stdout.split())


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="KVStoreOther"):
        _ = kvstore_vllm.KVStoreOther
