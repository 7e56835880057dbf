# SPDX-License-Identifier: Apache-2.0
"""Pure arithmetic of sizes and times; the engine and the planners call the same functions."""
