# SPDX-License-Identifier: Apache-2.0
"""Command `vllm-tiered`: it parses arguments, calls the other packages and prints results."""
