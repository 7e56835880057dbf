# SPDX-License-Identifier: Apache-2.0
"""Index of a layer's neuron cache on the device (M2Cache, 5.3; LLM in a flash, 3.1)."""
