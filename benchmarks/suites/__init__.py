# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, by the part of the plugin that they measure."""
