# SPDX-License-Identifier: Apache-2.0
"""Scores of neurons to lists by precision, on the device (M2Cache, 5.2)."""
