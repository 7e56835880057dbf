# SPDX-License-Identifier: Apache-2.0
"""Cache of the neurons that stay near from token to token (M2Cache, 5.3; LLM in a flash, 3.1)."""
