"""Configurations of the vLLM adapter, in the form of vLLM's own tiering, that tests vary."""

from __future__ import annotations

from typing import Any

__all__ = ["FS", "GIB", "HOST", "OBJ", "SECRET", "native"]

GIB = 2**30
HOST = "ram://?capacity=64GiB"
SECRET = "hunter2"
FS = {"type": "fs", "root_dir": "/mnt/kv"}
OBJ = {"bucket": "b", "endpoint_override": "10.0.0.1:9000", "access_key": "alice", "secret_key": SECRET}


def native(*tiers: Any, **more: Any) -> dict[str, Any]:
    return {"cpu_bytes_to_use": GIB, "secondary_tiers": list(tiers), **more}
