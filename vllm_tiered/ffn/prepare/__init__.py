# SPDX-License-Identifier: Apache-2.0
"""Offline preparation of a model: neuron store, predictors, precision ratio and statistics."""
