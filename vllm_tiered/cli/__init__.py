# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-tiered`: reads arguments, calls the layers below, prints what they say."""
