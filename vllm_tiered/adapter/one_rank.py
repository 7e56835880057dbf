# SPDX-License-Identifier: Apache-2.0
"""vLLM's groups of ranks for a single one, which its classes of parameters ask for their rank."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from typing import Any


def start_one_rank(vllm_config: Any) -> None:
    """Start vLLM's groups with one rank, in this process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with (
        tempfile.NamedTemporaryFile(delete=False) as rendezvous,
        set_current_vllm_config(vllm_config),
    ):
        init_distributed_environment(
            1, 0, f"file://{rendezvous.name}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Have vLLM's groups and a configuration of defaults, unless this process has groups."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, model_parallel_is_initialized

    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it says of these defaults is about nothing served
    try:
        config = VllmConfig()
    finally:
        logger.setLevel(level)
    with set_current_vllm_config(config):
        if model_parallel_is_initialized():
            yield
            return
        start_one_rank(config)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()
