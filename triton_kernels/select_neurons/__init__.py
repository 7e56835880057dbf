# SPDX-License-Identifier: Apache-2.0
"""Selection of neurons by score into lists by precision, on the device (M2Cache, 5.2)."""
