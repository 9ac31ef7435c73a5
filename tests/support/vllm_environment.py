"""What the environment must say before vLLM is imported, for engines on a CPU in this process."""

from __future__ import annotations

import os

__all__ = ["prepare"]

_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare() -> None:
    """Set the variables; processes that are started inherit them."""
    os.environ.update(_VARIABLES)
