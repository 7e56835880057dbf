# SPDX-License-Identifier: Apache-2.0
"""The GPU's device: streams, events, page-locked host memory."""
