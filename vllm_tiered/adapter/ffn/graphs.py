# SPDX-License-Identifier: Apache-2.0
"""FFNs from a neuron store beside CUDA graphs: never in one.

The host chooses a layer's neurons in each step, so ``tiered::sparse_ffn`` has to run between
graphs, as attention does in vLLM's piecewise ones:

    graph │ attention │ graph │ sparse FFN │ graph │ attention │ ...

What cannot be split there is run without graphs.
"""

import logging
from typing import TYPE_CHECKING

from vllm_tiered.adapter import cuda_graphs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OP = "tiered::sparse_ffn"

logger = logging.getLogger("vllm.tiered")


def split_at_ffn(vllm_config: "VllmConfig") -> None:
    """Have graphs end before each FFN and begin anew behind it, or leave them out.

    Changes ``vllm_config``; with a notice where that is another mode than asked for.
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
            "tiered ffn: CUDA graphs are %s instead of %s: the host chooses a layer's neurons in "
            "each step, which no graph can repeat%s",
            compilation.cudagraph_mode.name,
            mode.name,
            "" if reason is None else f" ({reason})",
        )
