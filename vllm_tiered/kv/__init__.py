# SPDX-License-Identifier: Apache-2.0
"""Per-layer KV swapping (Pie): pages, mapping table, staging, swapping. It knows no engine."""
