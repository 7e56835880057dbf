# SPDX-License-Identifier: Apache-2.0
"""Splitting CUDA graphs at ops that run host code, or disabling them.

A CUDA graph replays GPU work, but no Python. So graphs are split at the ops that run host code, as
vLLM splits them at attention.
"""

from collections.abc import Sequence
from typing import Any


def find_split_obstacle(compilation: Any) -> str | None:
    """Return why vLLM cannot split its graphs at ops and what to change; None if it can.

    Args:
        compilation: vLLM's CompilationConfig.
    """
    from vllm import envs
    from vllm.config import CompilationMode

    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return (
            "VLLM_USE_BREAKABLE_CUDAGRAPH also captures what is not compiled, the host's part "
            "included; set it to 0"
        )
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        return f"graphs are split in what vLLM compiles, and its mode is {compilation.mode.name}"
    # If attention is captured too, a graph covers a whole step.
    if not compilation.splitting_ops_contain_attention():
        return "splitting_ops leaves attention in the graphs; leave it out"
    return None


def split_graphs_at(ops: Sequence[str], compilation: Any) -> None:
    """Split graphs at `ops` too, so that vLLM captures only the pieces between them."""
    from vllm.config import CUDAGraphMode

    compilation.splitting_ops = list(dict.fromkeys((*compilation.splitting_ops, *ops)))
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def disable_cuda_graphs(compilation: Any) -> None:
    """Configure vLLM to capture no CUDA graphs."""
    from vllm.config import CUDAGraphMode

    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.max_cudagraph_capture_size = 0
    compilation.cudagraph_capture_sizes = []
