"""Ways to keep what the device forgets, each an engine of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tiny_engines import offloading

from support.object_store import Bucket

from .contender import Contender, open_contender
from .geometry import ENGINE, HOST

__all__ = ["CONFIGURATIONS", "DISK", "HOST_ONLY", "NOTHING", "S3", "VLLM", "open_engines"]

NOTHING, HOST_ONLY, DISK, S3 = "no offload", "host", "host + disk", "host + S3"
#: vLLM's own host memory and tier on disk.
VLLM = "vLLM's tiering"
#: All of them, in the order of the tables; what is compared with each other stands side by side.
CONFIGURATIONS = (NOTHING, HOST_ONLY, DISK, VLLM, S3)


@contextmanager
def open_engines(
    names: Iterable[str], model: Path, folder: Path, bucket: Bucket | None = None
) -> Iterator[dict[str, Contender]]:
    """Engines of these configurations, all of them alive in this process.

    Parameters
    ----------
    names : iterable of str
    model : path
        Folder of the model.
    folder : path
        Where tiers on disk have their files.
    bucket : Bucket, optional
        Needed for S3.
    """
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(open_contender(model, _options(name, folder, bucket), **ENGINE))
            for name in names
        }


def _options(name: str, folder: Path, bucket: Bucket | None) -> dict[str, Any] | None:
    if name == NOTHING:
        return None
    if name == VLLM:
        tier = {"type": "fs", "root_dir": str(folder / "vllm")}
        return {
            "spec_name": "TieringOnCPU",
            "spec_module_path": "_sweep.peer",
            "cpu_bytes_to_use": HOST,
            "secondary_tiers": [tier],
        }
    tiers: dict[str, list[Any]] = {HOST_ONLY: [], DISK: [f"file://{folder}/kvstore"]}
    if bucket is not None:
        tiers[S3] = [{"url": bucket.url, "storage_options": bucket.options}]
    return offloading(*tiers[name], capacity=HOST)
