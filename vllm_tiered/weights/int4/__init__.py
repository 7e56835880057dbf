# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 bit: their layout, and their GEMM on a CPU and on a GPU."""
