# SPDX-License-Identifier: Apache-2.0
"""Device-resident slot table of a layer's experts, and the copies of missing experts to slots."""
