# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the L2 prefetch (PRESERVE)."""
