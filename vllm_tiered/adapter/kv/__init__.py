# SPDX-License-Identifier: Apache-2.0
"""The KV connector and what it needs of vLLM."""
