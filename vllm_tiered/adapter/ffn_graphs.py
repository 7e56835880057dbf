# SPDX-License-Identifier: Apache-2.0
"""FFNs from a neuron store beside CUDA graphs: never in one.

The host chooses a layer's neurons in each step, so ``tiered::sparse_ffn`` has to run between
graphs, as attention does in vLLM's piecewise ones:

    graph │ attention │ graph │ sparse FFN │ graph │ attention │ ...

What cannot be split there is run without graphs.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OP = "tiered::sparse_ffn"

logger = logging.getLogger("vllm.tiered")


def split_at_ffn(vllm_config: "VllmConfig") -> None:
    """Have graphs end before each FFN and begin anew behind it, or leave them out.

    Changes ``vllm_config``; with a notice where that is another mode than asked for.
    """
    import vllm.envs as envs
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode == CUDAGraphMode.NONE:
        return
    # Not where attention is captured too, which needs graphs of whole steps.
    splits = (
        compilation.mode == CompilationMode.VLLM_COMPILE
        and compilation.splitting_ops_contain_attention()
    )
    if not splits or envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.max_cudagraph_capture_size = 0
        compilation.cudagraph_capture_sizes = []
    else:
        assert compilation.splitting_ops is not None
        if OP not in compilation.splitting_ops:
            compilation.splitting_ops = [*compilation.splitting_ops, OP]
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    if compilation.cudagraph_mode != mode:
        logger.warning(
            "tiered ffn: CUDA graphs are %s instead of %s: the host chooses a layer's neurons in "
            "each step, which no graph can repeat",
            compilation.cudagraph_mode.name,
            mode.name,
        )
