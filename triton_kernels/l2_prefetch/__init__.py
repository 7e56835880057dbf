# SPDX-License-Identifier: Apache-2.0
"""Memory asked for ahead, into the GPU's L2: of tensors, and of KV pages by the block table."""
