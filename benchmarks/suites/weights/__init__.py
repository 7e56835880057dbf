# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of placed weights (HeLM, FlexGen), and of the planner's predictions."""
