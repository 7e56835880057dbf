# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the sparse FFN (M2Cache, LLM in a flash)."""
