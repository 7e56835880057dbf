# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs with FFNs from a neuron store, which no graph captures.

The host selects a layer's neurons in each step. So ``tiered::sparse_ffn`` must run between graphs,
as attention does in vLLM's piecewise mode:

    graph │ attention │ graph │ sparse FFN │ graph │ attention │ ...

A model that cannot be split there runs without graphs.
"""

from typing import TYPE_CHECKING

from vllm_tiered.adapter import cuda_graphs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OP = "tiered::sparse_ffn"


def split_at_ffn(vllm_config: "VllmConfig") -> None:
    """Split CUDA graphs at each FFN, or disable them if the model cannot be split."""
    cuda_graphs.run_between_graphs(
        [OP],
        vllm_config.compilation_config,
        part="ffn",
        why="the host selects a layer's neurons in each step",
    )
