# SPDX-License-Identifier: Apache-2.0
"""Prefetch of tensors, and of KV pages by the block table, into the GPU's L2."""
