# SPDX-License-Identifier: Apache-2.0
"""Codec that loses nothing of the worker model's values: 32 bits of each are enough."""

import numpy as np

from vllm_tiered.devices.pages import PageCodec, PageIds, Words


class HalvedPages(PageCodec):
    """Codec from pages of int64 to pages of int32.

    Args:
        near_bytes: bytes of a near page, at least 16.
    """

    def __init__(self, near_bytes: int) -> None:
        self.near_bytes = near_bytes
        self.far_bytes = -(-near_bytes // 16) * 8
        self._num_values = near_bytes // 8

    def encode(self, near: Words, near_ids: PageIds, far: Words, far_ids: PageIds) -> None:
        values = far.view(np.int32)
        values[far_ids, : self._num_values] = near[near_ids]

    def decode(self, far: Words, far_ids: PageIds, near: Words, near_ids: PageIds) -> None:
        near[near_ids] = self.values_of(far[far_ids])

    def values_of(self, far: Words) -> Words:
        """Return what far pages hold."""
        return far.view(np.int32)[:, : self._num_values].astype(np.int64)
