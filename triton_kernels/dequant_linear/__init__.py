# SPDX-License-Identifier: Apache-2.0
"""Linear layers with 4-bit weights, quantised by group minimum and maximum (FlexGen, section 5)."""
