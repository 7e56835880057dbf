# SPDX-License-Identifier: Apache-2.0
"""The neuron store on disk: format, writer, reader."""
