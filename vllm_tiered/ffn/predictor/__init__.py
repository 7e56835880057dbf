# SPDX-License-Identifier: Apache-2.0
"""Predictors of the neurons that matter for a hidden state (Deja Vu)."""
