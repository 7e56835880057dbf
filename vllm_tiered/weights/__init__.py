# SPDX-License-Identifier: Apache-2.0
"""Weights over mixed memory: sublayers that are far arrive while those before compute (HeLM)."""
