# SPDX-License-Identifier: Apache-2.0
"""Which neurons matter for a hidden state, before they are computed (Deja Vu)."""
