# SPDX-License-Identifier: Apache-2.0
"""Measurements of a machine's memory tiers, links, disks and GEMMs."""
