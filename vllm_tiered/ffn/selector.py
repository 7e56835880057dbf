# SPDX-License-Identifier: Apache-2.0
"""Selection of a step's neurons on the device that has the scores: the host, or a GPU by kernels.

    host     scores ─────────────────────────────► select
    GPU      scores ─► rank ─► best of the tokens ─► N bytes to the host ─► selection
                                                └──► cache index on the GPU (SparseOnDevice)

B tokens, N neurons of a layer.
"""

import numpy as np
import torch

from vllm_tiered.ffn.selection import Mix, Selection, select


class Selector:
    """Selects one layer's neurons from their scores.

    Args:
        mix: shares of the neurons by precision.
        threshold: neurons with lower scores are left out.
    """

    def __init__(self, mix: Mix, threshold: float) -> None:
        self._mix = mix
        self._threshold = threshold
        self._edges: torch.Tensor | None = None

    def encode(self, scores_BN: torch.Tensor) -> torch.Tensor:
        """Return a near tensor that :meth:`decode` takes on the host; does not wait for the GPU."""
        return self.rank(scores_BN) if scores_BN.device.type == "cuda" else scores_BN

    def rank(self, scores_BN: torch.Tensor) -> torch.Tensor:
        """Rank neurons with kernels and return near uint8 [N]; does not wait for the GPU.

        Bit 0 is set for full precision, bit 1 for at least 8 bit, bit 2 for at least 4 bit. So a
        value is 7, 6, 4 or 0.
        """
        # Imported here: only a GPU needs Triton.
        from vllm_tiered.kernels.select_neurons import api

        is_gpu = scores_BN.device.type == "cuda"
        name = torch.cuda.get_device_name(scores_BN.device) if is_gpu else None
        if self._edges is None:
            self._edges = api.edges_of(self._mix.shares, scores_BN.device)
        reached_BN = api.rank(scores_BN, self._edges, self._threshold, device_name=name)
        # A set bit implies the bits above it, so the maximum over tokens is their bitwise or.
        best_N: torch.Tensor = reached_BN.amax(dim=0)
        return best_N

    def decode(self, encoded: torch.Tensor) -> Selection:
        """Return the selection from the result of :meth:`encode`, copied to the host."""
        if encoded.dtype != torch.uint8:
            return select(encoded, self._mix, self._threshold)
        reached_N = encoded.numpy()
        full, int8, int4 = (np.flatnonzero(reached_N == best) for best in (7, 6, 4))
        return Selection(full, int8, int4)
