# SPDX-License-Identifier: Apache-2.0
"""Weights over mixed memory: sublayers that are far arrive while the one before computes (HeLM)."""
