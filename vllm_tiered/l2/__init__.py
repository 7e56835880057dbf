# SPDX-License-Identifier: Apache-2.0
"""Weights and KV brought to the last-level cache while ranks wait for each other (PRESERVE)."""
