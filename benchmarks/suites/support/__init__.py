# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of what the plugin supports."""
