# SPDX-License-Identifier: Apache-2.0
"""Strategies to compute a layer's FFN: densely, or sparsely with a plan of the host or a GPU."""
