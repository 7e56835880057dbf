# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs with FFNs from a neuron store, which no graph captures.

The host selects a layer's neurons in each step. So ``tiered::sparse_ffn`` must run between graphs,
as attention does in vLLM's piecewise mode:

    graph │ attention │ graph │ sparse FFN │ graph │ attention │ ...

A model that cannot be split there runs without graphs.
"""

import logging
from typing import TYPE_CHECKING

from vllm_tiered.adapter import cuda_graphs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OP = "tiered::sparse_ffn"

logger = logging.getLogger("vllm.tiered")


def split_at_ffn(vllm_config: "VllmConfig") -> None:
    """Split CUDA graphs at each FFN, or disable them if the model cannot be split.

    Changes ``vllm_config``, and warns if that changes the CUDA graph mode.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if not mode:
        return
    reason = cuda_graphs.find_split_obstacle(compilation)
    if reason is None:
        cuda_graphs.split_graphs_at([OP], compilation)
    else:
        cuda_graphs.disable_cuda_graphs(compilation)
    if compilation.cudagraph_mode != mode:
        logger.warning(
            "tiered ffn: CUDA graphs are %s instead of %s: the host selects a layer's neurons in "
            "each step, which no graph can repeat%s",
            compilation.cudagraph_mode.name,
            mode.name,
            "" if reason is None else f" ({reason})",
        )
