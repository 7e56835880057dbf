# SPDX-License-Identifier: Apache-2.0
"""The weight offloader and what it needs of vLLM."""
