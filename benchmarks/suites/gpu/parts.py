# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that need a GPU, by name and with what each measures: entries of the registry."""

from __future__ import annotations

from collections.abc import Mapping

PARTS: Mapping[str, str] = {
    "link": "host link by page size: copy engine and kernel, and launch parameters to take",
    "kernels": "Triton kernels against the memory's bandwidth and torch",
    "l2": "prefetching into the L2 around an emulated all-reduce",
    "kv": "KV swapping against vLLM in the same KV memory, on a GPU",
    "weights": "far weights against vLLM's own offloaders, same near bytes",
    "ffn": "the sparse FFN against streaming the dense one: synthetic sparsity",
}
"""The order in which they run; those without an engine run first."""
