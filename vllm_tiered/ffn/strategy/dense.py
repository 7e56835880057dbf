# SPDX-License-Identifier: Apache-2.0
"""Dense strategy: permanently near neurons first, the others streamed through staging buffers."""

import torch

from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.strategy.base import Strategy, empty_output


class Dense(Strategy):
    """Computes a layer with all of its neurons in one precision."""

    def compute(self, x_BH: torch.Tensor, *, is_warm: bool = False) -> torch.Tensor:
        """Return the FFN's output without the last bias, float32 [B, H]; never None."""
        rank, resources = self._rank, self._resources
        begin = rank.clock.now()
        resources.stats.dense_steps += 1
        out_BH = empty_output(x_BH)
        if resources.num_permanent:
            full = resources.buffers[Precision.FULL]
            self._add_neurons(out_BH, x_BH, full, resources.num_permanent)
        stream = rank.stream
        for chunk in stream.chunks(self._index, wraps=resources.selector is None):
            scales, up_bias = resources.tables.slice(
                stream.precision, chunk.first, chunk.num_neurons
            )
            staged = NeuronCacheBuffer(
                bundles=stream.staging[chunk.buffer_id].data[: chunk.num_neurons],
                shape=rank.store.shape,
                precision=stream.precision,
                dtype=rank.store.dtype,
                scales=scales,
                up_bias=up_bias,
            )
            self._add_neurons(out_BH, x_BH, staged, chunk.num_neurons)
        num_tokens = len(x_BH)
        rank.clock.measure(begin, lambda seconds: rank.cost_model.add_dense(seconds, num_tokens))
        return out_BH
