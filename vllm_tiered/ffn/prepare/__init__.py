# SPDX-License-Identifier: Apache-2.0
"""What is done once for a model: its neuron store, predictors, ratio of precisions, statistics."""
