# SPDX-License-Identifier: Apache-2.0
"""Ways to compute a layer's FFN: all neurons, or a selection planned by the host or a GPU."""
