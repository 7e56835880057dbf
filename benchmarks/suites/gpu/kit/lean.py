# SPDX-License-Identifier: Apache-2.0
"""Packages and files that TRITON_ATTN serving of dense 16-bit models (OPT, Llama) does not need.

The lists are for vLLM 0.32's requirements and its wheel. `install --probe` imports `IMPORTS` where
the kit is installed.
"""

from __future__ import annotations

from collections.abc import Mapping

ATTENTION = "kernels of other attention backends; serve with --attention-backend TRITON_ATTN"
QUANTISED = "kernels of quantised models and mixtures of experts"
MEDIA = "reads images, sound or video"
LOADERS = "another way to load checkpoints"

DISTRIBUTIONS: Mapping[str, str] = {
    "flashinfer-python": ATTENTION,
    "tokenspeed-mla": ATTENTION,
    "quack-kernels": ATTENTION,
    "nvidia-cutlass-dsl": ATTENTION,
    "nvidia-cudnn-frontend": ATTENTION,
    "tilelang": QUANTISED,
    "humming-kernels": QUANTISED,
    "torchaudio": MEDIA,
    "torchcodec": MEDIA,
    "pynvvideocodec": MEDIA,
    "opencv-python-headless": MEDIA,
    "fastsafetensors": LOADERS,
    "instanttensor": LOADERS,
}
"""Requirements that may be left out, by name, and why."""

_PREFIXES = (
    "vllm/vllm_flash_attn/_vllm_fa",
    "vllm/_flashmla_",
    "vllm/_flashkda_",
    "vllm/_deepselect_",
    "vllm/_qutlass_",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/_moe_C_",
    "vllm/vllm-rs",
)
"""Files of vLLM's wheel that may be left out.

They are extensions of the above, and a front end in Rust that `vllm serve` does not need.
"""


def is_dropped(name: str) -> bool:
    """Return whether a file of vLLM's wheel may be left out."""
    return name.startswith(_PREFIXES)


IMPORTS = (
    "vllm._C_stable_libtorch",
    "vllm.platforms.cuda",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.model_executor.models.opt",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.offloader.prefetch",
    "vllm.model_executor.offloader.uva",
)
"""Modules that an engine and a server of such models import."""
