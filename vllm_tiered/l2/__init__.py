# SPDX-License-Identifier: Apache-2.0
"""Prefetch of weights and KV into the last-level cache during all-reduces (PRESERVE)."""
