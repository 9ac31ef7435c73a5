"""Which deployments of an engine the adapter serves: one node, without Ray."""

from __future__ import annotations

from typing import Any

from kvstore.errors import ConfigError

__all__ = ["check_topology"]


def check_topology(parallel_config: Any) -> None:
    """Return when all workers of the engine are processes of this machine that share its memory.

    Parameters
    ----------
    parallel_config : vllm.config.ParallelConfig
        Replicas of a data-parallel deployment may be on other nodes: each has a host tier of its own.

    Raises
    ------
    ConfigError
        The engine uses Ray, or spans nodes.
    """
    if parallel_config.use_ray:
        raise ConfigError(
            "kvstore_vllm does not work with Ray, whose workers may share no memory with the scheduler; "
            "use --distributed-executor-backend mp"
        )
    nodes = parallel_config.nnodes_within_dp
    if nodes > 1:
        raise ConfigError(
            f"kvstore_vllm serves the workers of one node, and this engine spans {nodes}; "
            "use an engine for each node (data parallel)"
        )
