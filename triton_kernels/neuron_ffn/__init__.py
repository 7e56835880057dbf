# SPDX-License-Identifier: Apache-2.0
"""The FFN over cached neurons: products used where the bundles lie, in 16, 8 and 4 bit."""
