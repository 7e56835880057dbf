# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs where the host has a part in a layer: cut there, as vLLM cuts at attention, or none.

A captured graph repeats what the GPU was given, and no Python.
"""

from collections.abc import Sequence
from typing import Any


def why_uncut(compilation: Any) -> str | None:
    """Why vLLM cannot cut its graphs at ops, and what would change that; None if it can.

    Args:
        compilation: vLLM's configuration of it.
    """
    from vllm import envs
    from vllm.config import CompilationMode

    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return (
            "VLLM_USE_BREAKABLE_CUDAGRAPH captures what is not compiled, the host's part "
            "included; set it to 0"
        )
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        return f"graphs are cut in what vLLM compiles, and its mode is {compilation.mode.name}"
    # Where attention is captured too, graphs are of whole steps.
    if not compilation.splitting_ops_contain_attention():
        return "splitting_ops leaves attention in the graphs; leave it out"
    return None


def cut_at(ops: Sequence[str], compilation: Any) -> None:
    """Only pieces between these ops are captured, and no graph of a whole step."""
    from vllm.config import CUDAGraphMode

    compilation.splitting_ops = list(dict.fromkeys((*compilation.splitting_ops, *ops)))
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def leave_out(compilation: Any) -> None:
    """Nothing is captured."""
    from vllm.config import CUDAGraphMode

    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.max_cudagraph_capture_size = 0
    compilation.cudagraph_capture_sizes = []
