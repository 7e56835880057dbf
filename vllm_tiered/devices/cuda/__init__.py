# SPDX-License-Identifier: Apache-2.0
"""Device of a GPU: streams, events, pinned host memory."""
