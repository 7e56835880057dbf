# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of vllm-tiered: `python -m benchmarks list | run NAME | demo | model`."""
