# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights in 4 bit, group-wise min/max (FlexGen, section 5)."""
