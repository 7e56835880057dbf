# SPDX-License-Identifier: Apache-2.0
"""Prefetch of tensors, and of the KV pages in a block table, into the GPU's L2 cache."""
