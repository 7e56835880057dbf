# SPDX-License-Identifier: Apache-2.0
"""Kernels of GPU-only FFN steps, run without a GPU by their references in the fake's stream.

Lists and ranks are poison until the stream has executed them, as on a GPU.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.fakes.deferred_torch import DeferredTorch
from vllm_tiered.ffn import runtime
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.matmul import compute
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.ffn.strategy import sparse_on_device
from vllm_tiered.ffn.strategy.sparse_on_device import SparseOnDevice
from vllm_tiered.kernels.neuron_cache import reference as index_reference
from vllm_tiered.kernels.neuron_cache.index import empty_plan
from vllm_tiered.kernels.select_neurons import reference as ranks_reference

POISON = 0x5A


class DeferredGpu:
    """Patches that make the runtime treat the cache buffers of far layers as GPU memory.

    Attributes:
        counts: near counts of every step.
        received: the counts that the host received.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deferred: DeferredTorch) -> None:
        self._deferred = deferred
        self.counts: list[torch.Tensor] = []
        self.received: list[list[list[int]]] = []
        monkeypatch.setattr(runtime, "gpu_kernels", lambda buffer: compute)
        monkeypatch.setattr(
            Selector, "rank", lambda selector, scores_BN: self._rank(selector, scores_BN)
        )
        monkeypatch.setattr(sparse_on_device, "fill_and_add", self._fill_and_add)
        monkeypatch.setattr(
            sparse_on_device, "num_fills", lambda buffer, num_tokens: -(-num_tokens // 4)
        )
        make = SparseOnDevice.__init__

        def with_reference(step: Any, *args: Any, **kwargs: Any) -> None:
            make(step, *args, **kwargs)
            step._plan = self._plan

        step_bytes = SparseOnDevice.step_bytes

        def receiving(step: Any, counts_P4: torch.Tensor, num_tokens: int) -> tuple[int, int]:
            self.received.append(counts_P4.tolist())
            return step_bytes(step, counts_P4, num_tokens)

        monkeypatch.setattr(SparseOnDevice, "__init__", with_reference)
        monkeypatch.setattr(SparseOnDevice, "step_bytes", receiving)

    def _rank(self, selector: Any, scores_BN: torch.Tensor) -> torch.Tensor:
        shares, threshold = selector._mix.shares, selector._threshold
        edges = [sum(shares[: i + 1]) for i in range(3)]
        reached_N = self._near((scores_BN.shape[1],), torch.uint8)

        def run() -> None:
            reached = ranks_reference.reached(scores_BN, edges, threshold).any(dim=1)
            reached_N.copy_((reached.int() * torch.tensor([[1], [2], [4]])).sum(dim=0))

        self._deferred._submit(run)
        return reached_N

    def _plan(self, index: Any, reached_N: torch.Tensor, *, device_name: str | None) -> Any:
        plan = empty_plan(index)
        plan = replace(
            plan,
            **{f.name: self._near(one.shape, one.dtype) for f, one in _tensors(plan)},
        )

        def run() -> None:
            for field, one in _tensors(index_reference.plan(index, reached_N)):
                getattr(plan, field.name).copy_(one)

        self._deferred._submit(run)
        self.counts.append(plan.counts_P4)
        return plan

    def _fill_and_add(
        self,
        out_BH: torch.Tensor,
        x_BH: torch.Tensor,
        buffer: NeuronCacheBuffer,
        missing: compute.Missing,
        activation: str,
    ) -> None:
        def run() -> None:
            num_missing, num_present = missing.counts.tolist()
            neurons, slots = missing.neuron_ids[:num_missing], missing.slot_ids[:num_missing]
            present = missing.retained_slot_ids[:num_present]
            kept = slots >= 0
            buffer.bundles[slots[kept]] = missing.slab[neurons[kept]]
            buffer.fill(slots[kept], neurons[kept], missing.scales, missing.up_bias)

            def joined(table: torch.Tensor | None, near: torch.Tensor | None) -> Any:
                if table is None or near is None:
                    return None
                return torch.cat([table[neurons], near[present]])

            listed = replace(
                buffer,
                bundles=joined(missing.slab, buffer.bundles),
                scales=joined(missing.scales, buffer.scales),
                up_bias=joined(missing.up_bias, buffer.up_bias),
            )
            out_BH.add_(compute.ffn_output(x_BH, listed, listed.capacity, activation))

        self._deferred._submit(run)

    def _near(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        made.view(torch.uint8).fill_(POISON if dtype != torch.bool else 1)
        return self._deferred.mark(made)


def _tensors(owner: Any) -> list[tuple[Any, torch.Tensor]]:
    return [(field, getattr(owner, field.name)) for field in fields(owner)]
