# SPDX-License-Identifier: Apache-2.0
"""The sparse mixed-precision FFN and its multi-level neuron cache (M2Cache, LLM in a flash)."""
