# SPDX-License-Identifier: Apache-2.0
"""FFN over cached neurons, computed from their bundles in 16, 8 and 4 bit."""
