# SPDX-License-Identifier: Apache-2.0
"""What is measured on a GPU: `python -m benchmarks.gpu`, and the kit that brings vLLM to one."""
