# SPDX-License-Identifier: Apache-2.0
"""Replicas of a data-parallel server: how many share a host, and which one an engine is.

A replica is an engine with its own scheduler, ranks and KV cache. vLLM makes the engines of a dense
model forget that there are others before they start. So the numbers are written down while the
configuration is made, beside the plugin's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

REPLICAS_KEY = "tiered_replicas"
"""Key in `additional_config` of a server with several replicas: a :class:`Replicas` as a dict."""


class Replicas(NamedTuple):
    """The replicas of a server.

    Attributes:
        here: replicas whose engines share this host's memory.
        total: replicas on all hosts.
    """

    here: int = 1
    total: int = 1


def count_replicas(parallel_config: Any) -> Replicas:
    """Return the replicas of a finished ``ParallelConfig``, before an engine adjusts it.

    If each replica has an API server of its own, all may be on this host: nobody knows.
    """
    total = parallel_config.data_parallel_size
    has_own_server = (
        parallel_config.data_parallel_external_lb
        or parallel_config.data_parallel_rank_local is not None
    )
    here = total if has_own_server else max(1, parallel_config.data_parallel_size_local)
    return Replicas(here, total)


def read_replicas(vllm_config: Any) -> Replicas:
    """Return the replicas of the server that a ``VllmConfig`` of one of its engines belongs to."""
    additional = vllm_config.additional_config
    stated = additional.get(REPLICAS_KEY) if isinstance(additional, Mapping) else None
    return Replicas(**stated) if stated else Replicas()


def ranks_here(vllm_config: Any) -> int:
    """Return how many ranks share this host's memory: an engine's here, of each replica here."""
    local = max(1, int(vllm_config.parallel_config.local_world_size))
    return local * read_replicas(vllm_config).here


def is_first_here(parallel_config: Any) -> bool:
    """Return whether an engine is the first of its server on this host."""
    return not parallel_config.data_parallel_rank_local


def path_of_replica(path: str, vllm_config: Any) -> str:
    """Return the path with the replica's number in the file's name, if there are several."""
    if read_replicas(vllm_config).total == 1:
        return path
    return _numbered(path, vllm_config.parallel_config.data_parallel_index)


def paths_here(path: str, vllm_config: Any) -> list[str]:
    """Return the paths that the replicas which this server starts have for a configured one."""
    if read_replicas(vllm_config).total == 1:
        return [path]
    parallel = vllm_config.parallel_config
    first = parallel.data_parallel_rank
    end = first + max(1, parallel.data_parallel_size_local)
    return [_numbered(path, index) for index in range(first, end)]


def _numbered(path: str, index: int) -> str:
    file = Path(path)
    return str(file.with_name(f"{file.stem}.dp{index}{file.suffix}"))
