# SPDX-License-Identifier: Apache-2.0
"""KV connector for vLLM, and its hooks into vLLM."""
