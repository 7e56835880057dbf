# SPDX-License-Identifier: Apache-2.0
"""Selection of neurons by score into one list for each precision, on the device (M2Cache, 5.2)."""
