# SPDX-License-Identifier: Apache-2.0
"""Experts through the tiers, attached to vLLM's `RoutedExperts`."""
