# SPDX-License-Identifier: Apache-2.0
"""Device-resident index of a layer's neuron cache (M2Cache, 5.3; LLM in a flash, 3.1)."""
