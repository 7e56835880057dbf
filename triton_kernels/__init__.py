# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, each with its reference in plain torch; installed as `vllm_tiered.kernels`.

From the repository root this directory is importable as `triton_kernels`, the name under which vLLM
looks for its MXFP4 kernels. The adapter hides the directory from vLLM
(`adapter/platform_plugin.py`). Without the adapter vLLM takes its own copy, because the import of
this one fails.
"""

if __name__ == "triton_kernels":
    raise ImportError("these are vllm-tiered's kernels: import them as vllm_tiered.kernels")
