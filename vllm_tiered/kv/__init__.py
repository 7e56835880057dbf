# SPDX-License-Identifier: Apache-2.0
"""Per-layer KV swapping (Pie): pages, mapping table, staging, swapping; knows no engine."""
