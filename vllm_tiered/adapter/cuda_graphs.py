# SPDX-License-Identifier: Apache-2.0
"""Splitting CUDA graphs at ops that run host code, or disabling them.

A CUDA graph replays GPU work, but no Python. So graphs are split at the ops that run host code, as
vLLM splits them at attention.
"""

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("vllm.tiered")


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


def run_between_graphs(ops: Sequence[str], compilation: Any, *, part: str, why: str) -> None:
    """Split CUDA graphs at `ops`, or disable them if the model cannot be split.

    Changes `compilation`, and warns if that changes the CUDA graph mode.

    Args:
        part: the part that needs it, for the warning.
        why: what the host does in each step.
    """
    mode = compilation.cudagraph_mode
    if not mode:
        return
    reason = find_split_obstacle(compilation)
    if reason is None:
        split_graphs_at(ops, compilation)
    else:
        disable_cuda_graphs(compilation)
    if compilation.cudagraph_mode != mode:
        logger.warning(
            "tiered %s: CUDA graphs are %s instead of %s: %s, which no graph can repeat%s",
            part,
            compilation.cudagraph_mode.name,
            mode.name,
            why,
            "" if reason is None else f" ({reason})",
        )


def disable_cuda_graphs(compilation: Any) -> None:
    """Configure vLLM to capture no CUDA graphs."""
    from vllm.config import CUDAGraphMode

    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.max_cudagraph_capture_size = 0
    compilation.cudagraph_capture_sizes = []
