# SPDX-License-Identifier: Apache-2.0
"""Experts in 4 bit on a CPU: one layout, made from the checkpoints' layouts, and its GEMM."""
