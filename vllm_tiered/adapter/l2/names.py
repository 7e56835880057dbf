# SPDX-License-Identifier: Apache-2.0
"""Names of all-reduces, matmuls and attention in vLLM's compiled graphs."""

from vllm_tiered.l2.graph import OpNames

VLLM_OPS = OpNames(
    collectives={
        "vllm.all_reduce": "tensor",  # GPUs
        "_c10d_functional.all_reduce": "input",  # CPUs over gloo
        "_C.shm_allreduce": "data",  # CPUs over shared memory
    },
    waits=frozenset({"_c10d_functional.wait_tensor"}),
    matmuls={
        "aten.mm": "mat2",
        "aten.addmm": "mat2",
        "aten.linear": "weight",
        "aten._scaled_mm": "mat2",
        "_C.weight_packed_linear": "mat2",  # AMX
        "zentorch.zentorch_linear_unary": "weight",
        "_C.onednn_mm": None,  # packed by oneDNN, behind a handle
        "_C.onednn_scaled_mm": None,
    },
    attentions=frozenset({"vllm.unified_attention_with_output", "vllm.unified_attention"}),
)
