# SPDX-License-Identifier: Apache-2.0
"""Choosing a step's neurons where the scores are: on the host, or on a GPU by kernels.

    host     scores ─────────────────────────────► select
    GPU      scores ─► rank ─► best of the tokens ─► N bytes to the host ─► lists
                                                └──► books on the GPU (on_gpu.py)

B tokens, N neurons of a layer.
"""

import numpy as np
import torch

from vllm_tiered.ffn.selection import Mix, Selection, select


class Selector:
    """Of one layer.

    Args:
        threshold: neurons that score less are left out; None if all are ranked.
    """

    def __init__(self, mix: Mix, threshold: float | None) -> None:
        self._mix = mix
        self._threshold = threshold
        self._edges: torch.Tensor | None = None

    def encode(self, scores_BN: torch.Tensor) -> torch.Tensor:
        """What the host is to be told of the scores; near, and nothing waits."""
        return self.rank(scores_BN) if scores_BN.device.type == "cuda" else scores_BN

    def rank(self, scores_BN: torch.Tensor) -> torch.Tensor:
        """By kernels, uint8 [N]: bit 0 for full precision, 1 for 8 bit at least, 2 for 4 bit at
        least; 7, 6, 4 or 0. Near, and nothing waits."""
        # Without a GPU nothing needs Triton.
        from vllm_tiered.kernels.select_neurons import api

        is_gpu = scores_BN.device.type == "cuda"
        name = torch.cuda.get_device_name(scores_BN.device) if is_gpu else None
        if self._edges is None:
            self._edges = api.edges_of(self._mix.shares, scores_BN.device)
        reached_BN = api.rank(scores_BN, self._edges, self._threshold, device_name=name)
        # What has a bit has those above it too: the greatest of the tokens' is all of theirs.
        best_N: torch.Tensor = reached_BN.amax(dim=0)
        return best_N

    def decode(self, told: torch.Tensor) -> Selection:
        """From what :meth:`encode` gave, on the host."""
        if told.dtype != torch.uint8:
            return select(told, self._mix, self._threshold)
        reached_N = told.numpy()
        full, int8, int4 = (np.flatnonzero(reached_N == best) for best in (7, 6, 4))
        return Selection(full, int8, int4)
