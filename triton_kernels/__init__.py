# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, each with a reference in plain torch; installed as `vllm_tiered.kernels`.

From the repository root this directory is importable as `triton_kernels`. vLLM imports its MXFP4
kernels under that name, so the adapter hides the directory from vLLM
(`adapter/platform_plugin.py`). Without the adapter the import of this directory fails, and vLLM
uses its own copy.
"""

if __name__ == "triton_kernels":
    raise ImportError("these are vllm-tiered's kernels: import them as vllm_tiered.kernels")
