# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, grouped by the part of the plugin that they measure."""
