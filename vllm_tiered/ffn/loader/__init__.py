# SPDX-License-Identifier: Apache-2.0
"""Loading of neurons into near memory, from far memory or from the store."""
