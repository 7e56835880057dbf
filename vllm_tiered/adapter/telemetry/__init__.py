# SPDX-License-Identifier: Apache-2.0
"""What users see: manifest, metrics, timeline, energy and the /tiered endpoint."""
