# SPDX-License-Identifier: Apache-2.0
"""The books of a layer's cached neurons, on the device (M2Cache, 5.3; LLM in a flash, 3.1)."""
