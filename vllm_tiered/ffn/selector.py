# SPDX-License-Identifier: Apache-2.0
"""Select a step's neurons where the scores are: on the host, or on a GPU by kernels.

    host     scores ─────────────────────────────► select
    GPU      scores ─► rank ─► best of the tokens ─► N bytes to the host ─► selection
                                                └──► cache index on the GPU (SparseOnDevice)

B tokens, N neurons of a layer.
"""

import numpy as np
import torch

from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.selection import Mix, Selection, select
from vllm_tiered.ffn.store.reader import NeuronStore

_LEAST_SCORE = float(torch.finfo(torch.float32).tiny)


class Selector:
    """Selects one layer's neurons from their scores.

    Args:
        mix: shares of the neurons by precision.
        threshold: neurons that score less are left out; None if all are ranked.
    """

    def __init__(self, mix: Mix, threshold: float | None) -> None:
        self._mix = mix
        self._threshold = threshold
        self._edges: torch.Tensor | None = None

    def encode(self, scores_BN: torch.Tensor) -> torch.Tensor:
        """Return what :meth:`decode` needs of the scores on the host; near, without waiting."""
        return self.rank(scores_BN) if scores_BN.device.type == "cuda" else scores_BN

    def rank(self, scores_BN: torch.Tensor) -> torch.Tensor:
        """Rank neurons by kernels; return near uint8 [N], without waiting.

        Bit 0 is set for full precision, 1 for 8 bit at least, 2 for 4 bit at least: 7, 6, 4 or 0.
        """
        # Without a GPU nothing needs Triton.
        from vllm_tiered.kernels.select_neurons import api

        is_gpu = scores_BN.device.type == "cuda"
        name = torch.cuda.get_device_name(scores_BN.device) if is_gpu else None
        if self._edges is None:
            self._edges = api.edges_of(self._mix.shares, scores_BN.device)
        reached_BN = api.rank(scores_BN, self._edges, self._threshold, device_name=name)
        # A set bit implies those above it: the greatest of the tokens' values has all their bits.
        best_N: torch.Tensor = reached_BN.amax(dim=0)
        return best_N

    def decode(self, encoded: torch.Tensor) -> Selection:
        """Return the selection from what :meth:`encode` returned, copied to the host."""
        if encoded.dtype != torch.uint8:
            return select(encoded, self._mix, self._threshold)
        reached_N = encoded.numpy()
        full, int8, int4 = (np.flatnonzero(reached_N == best) for best in (7, 6, 4))
        return Selection(full, int8, int4)


def score_threshold(store: NeuronStore, predictor: Predictor | None) -> float | None:
    """Return the score below which neurons are inactive; None if no neuron ever is."""
    if predictor is not None:
        return predictor.threshold
    # ReLU leaves nothing of inactive neurons: over a base they score 0 exactly.
    return _LEAST_SCORE if store.activation == "relu" else None
