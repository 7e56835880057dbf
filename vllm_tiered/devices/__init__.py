# SPDX-License-Identifier: Apache-2.0
"""Memory tiers and the devices that copy between them."""
