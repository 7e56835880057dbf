# SPDX-License-Identifier: Apache-2.0
"""Planner: arithmetic of sizes and times, which the engine and the command line share."""
