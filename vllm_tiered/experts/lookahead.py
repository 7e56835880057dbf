# SPDX-License-Identifier: Apache-2.0
"""Experts read before their layer's router names them: which, how many, and whether it pays.

The hidden states of a layer's experts resemble those of the next layer's, as each layer adds little
to the residual stream. So the next layer's router, applied to them, names candidates. What
M2Cache's loader does for neurons two layers ahead (section 5.4) is a guess here, too: the link
carries it only while it is idle, from the arrival of a layer's experts to the next layer's step.

A trial decides whether that is faster (`vllm_tiered.trial`).
"""

import time

import numpy as np
import torch

from vllm_tiered.experts.policy import Experts

MOST_TOKENS = 32
"""Most tokens of a step that reads ahead; more want nearly all experts anyway."""

_SHARE = 0.25
"""Share of the latest window in the estimate."""


class IdleWindow:
    """How long the link is idle before a layer's step.

    Attributes:
        seconds: from :meth:`begin` to :meth:`end`, averaged over the latest steps; at first 0.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

    def begin(self) -> None:
        """Note that the layer before has all its experts."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Note that the layer's router has named its experts."""
        if self._began is not None:
            latest = time.perf_counter() - self._began
            self.seconds += _SHARE * (latest - self.seconds) if self.seconds else latest
            self._began = None


def likeliest(weights_MK: torch.Tensor, ids_MK: torch.Tensor, num_experts: int) -> Experts:
    """Return the experts that a router chose for any token, by the sum of their weights."""
    sums = np.zeros(num_experts)
    ids = ids_MK.cpu().numpy().ravel()
    np.add.at(sums, ids, weights_MK.float().cpu().numpy().ravel())
    chosen = np.unique(ids).astype(np.int64)
    return chosen[np.argsort(-sums[chosen], kind="stable")]
