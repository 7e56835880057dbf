# SPDX-License-Identifier: Apache-2.0
"""Weights over several memory tiers: layout, placement, prefetch and storage (HeLM)."""
