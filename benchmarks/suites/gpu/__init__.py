# SPDX-License-Identifier: Apache-2.0
"""Benchmarks for a GPU (`python -m benchmarks.suites.gpu`), and a kit that installs vLLM on one."""
