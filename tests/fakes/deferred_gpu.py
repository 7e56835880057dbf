# SPDX-License-Identifier: Apache-2.0
"""The kernels of steps on the GPU alone, without a GPU: their references, in the fake's stream.

Lists and ranks are poison until the stream has come to them, as on a GPU.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.fakes.deferred_torch import DeferredTorch
from vllm_tiered.ffn import on_gpu, runtime
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.matmul import compute
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.kernels.neuron_cache import reference as books_reference
from vllm_tiered.kernels.neuron_cache.index import empty_plan
from vllm_tiered.kernels.select_neurons import reference as ranks_reference

POISON = 0x5A


class DeferredGpu:
    """From now on far layers' regions are taken for a GPU's.

    Attributes:
        counts: of every step, near.
        heard: what the host was told of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: DeferredTorch) -> None:
        self._late = late
        self.counts: list[torch.Tensor] = []
        self.heard: list[list[list[int]]] = []
        monkeypatch.setattr(runtime, "gpu_kernels", lambda buffer: compute)
        monkeypatch.setattr(
            Selector, "rank", lambda choice, scores_BN: self._rank(choice, scores_BN)
        )
        monkeypatch.setattr(on_gpu, "fill_and_add", self._fill_and_add)
        monkeypatch.setattr(on_gpu, "num_fills", lambda buffer, num_tokens: -(-num_tokens // 4))
        make = on_gpu.SparseOnDevice.__init__

        def with_reference(step: Any, *args: Any, **kwargs: Any) -> None:
            make(step, *args, **kwargs)
            step._plan = self._plan

        bytes_of = on_gpu.SparseOnDevice.bytes_of

        def hearing(step: Any, counts_P4: torch.Tensor, num_tokens: int) -> tuple[int, int]:
            self.heard.append(counts_P4.tolist())
            return bytes_of(step, counts_P4, num_tokens)

        monkeypatch.setattr(on_gpu.SparseOnDevice, "__init__", with_reference)
        monkeypatch.setattr(on_gpu.SparseOnDevice, "bytes_of", hearing)

    def _rank(self, choice: Any, scores_BN: torch.Tensor) -> torch.Tensor:
        shares, threshold = choice._mix.shares, choice._threshold
        edges = [sum(shares[: i + 1]) for i in range(3)]
        reached_N = self._near((scores_BN.shape[1],), torch.uint8)

        def run() -> None:
            reached = ranks_reference.reached(scores_BN, edges, threshold).any(dim=1)
            reached_N.copy_((reached.int() * torch.tensor([[1], [2], [4]])).sum(dim=0))

        self._late._submit(run)
        return reached_N

    def _plan(self, books: Any, reached_N: torch.Tensor, *, device_name: str | None) -> Any:
        lists = empty_plan(books)
        lists = replace(
            lists,
            **{f.name: self._near(one.shape, one.dtype) for f, one in _tensors(lists)},
        )

        def run() -> None:
            for field, one in _tensors(books_reference.plan(books, reached_N)):
                getattr(lists, field.name).copy_(one)

        self._late._submit(run)
        self.counts.append(lists.counts_P4)
        return lists

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
            neurons, rows = missing.neuron_ids[:num_missing], missing.near_ids[:num_missing]
            present = missing.present_slot_ids[:num_present]
            kept = rows >= 0
            buffer.rows[rows[kept]] = missing.slab[neurons[kept]]
            buffer.fill(rows[kept], neurons[kept], missing.scales, missing.up_bias)

            def joined(table: torch.Tensor | None, near: torch.Tensor | None) -> Any:
                if table is None or near is None:
                    return None
                return torch.cat([table[neurons], near[present]])

            listed = replace(
                buffer,
                rows=joined(missing.slab, buffer.rows),
                scales=joined(missing.scales, buffer.scales),
                up_bias=joined(missing.up_bias, buffer.up_bias),
            )
            out_BH.add_(compute.product(x_BH, listed, len(listed.rows), activation))

        self._late._submit(run)

    def _near(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        made.view(torch.uint8).fill_(POISON if dtype != torch.bool else 1)
        return self._late.mark(made)


def _tensors(owner: Any) -> list[tuple[Any, torch.Tensor]]:
    return [(field, getattr(owner, field.name)) for field in fields(owner)]
