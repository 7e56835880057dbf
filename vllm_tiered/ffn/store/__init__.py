# SPDX-License-Identifier: Apache-2.0
"""Neuron store on disk: format, writer and reader."""
