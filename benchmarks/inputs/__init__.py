# SPDX-License-Identifier: Apache-2.0
"""Models, prompts and loads that benchmarks and tests run on."""
