# SPDX-License-Identifier: Apache-2.0
"""Memory tiers for stock vLLM: the KV cache no longer has to fit the near memory.

Importing this package does nothing and imports nothing: vLLM finds the plugin through its entry
points, and only `--plugin tiered` (or `additional_config["tiered"]`) switches it on.
"""

__version__ = "0.1.0"
