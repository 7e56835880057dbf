# SPDX-License-Identifier: Apache-2.0
"""GEMM over cached neurons, in C++ and in torch, and their 16, 8 and 4 bit codes."""
