# SPDX-License-Identifier: Apache-2.0
"""FFN over cached neurons, computed from bundles in float32, 16, 8 or 4 bit."""
