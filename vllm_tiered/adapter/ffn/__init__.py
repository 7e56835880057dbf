# SPDX-License-Identifier: Apache-2.0
"""The sparse FFN in vLLM's model."""
