# SPDX-License-Identifier: Apache-2.0
"""The L2 prefetch in vLLM's compiler and workers."""
