# SPDX-License-Identifier: Apache-2.0
"""A layer's result does not depend on slots, tiers or the order in which copies arrive."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.fakes.devices import DelayedDevice
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import IntegrityError
from vllm_tiered.experts.layer import ExpertLayer, HostRows, PagedRows
from vllm_tiered.experts.policy import Lru
from vllm_tiered.experts.slot_table import SlotTable
from vllm_tiered.storage.direct_file import aligned_pages

NUM_EXPERTS, TOP_K, HIDDEN, PAGE = 12, 3, 32, 4096


def make(num_slots, *, device=None, hits_first=True):
    """A layer whose expert e multiplies each token by a random matrix and adds a bias."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=generator)
    bias = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator)
    memory = aligned_pages(num_slots, PAGE, torch.device("cpu"))
    slots = memory.view(-1).view(torch.float32).view(num_slots, HIDDEN, HIDDEN)
    slot_bias = torch.full((num_slots, HIDDEN), torch.nan)
    slots.fill_(torch.nan)
    device = device or CpuDevice()
    layer = ExpertLayer(
        name="layer 0",
        device=device,
        table=SlotTable(num_slots, Lru(NUM_EXPERTS)),
        paged=[
            PagedRows(
                PageBuffer(rows.view(torch.uint8).view(-1, PAGE)), PageBuffer(memory), 1, 1, 0
            )
        ],
        host=[HostRows(bias, slot_bias)],
        hits_first=hits_first,
    )

    def run_on(w, b):
        def run(x_MH, weights_MK, ids_MK):
            out_MKH = torch.einsum("mkhi,mi->mkh", w[ids_MK.long()], x_MH) + b[ids_MK.long()]
            return (out_MKH * weights_MK[..., None]).sum(1)

        return run

    return SimpleNamespace(
        layer=layer, run=run_on(slots, slot_bias), expect=run_on(rows, bias), device=device
    )


def steps(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        tokens = [1, 2, 9][step % 3]
        scores = torch.rand(tokens, NUM_EXPERTS, generator=generator)
        weights, ids = scores.topk(TOP_K)
        yield torch.randn(tokens, HIDDEN, generator=generator), weights, ids.int()


@pytest.mark.parametrize("num_slots", [TOP_K, 5, 8, NUM_EXPERTS])
@pytest.mark.parametrize("hits_first", [False, True])
@pytest.mark.parametrize("late", [0.0, 0.002])
def test_the_result_is_that_of_all_experts(num_slots, hits_first, late):
    made = make(num_slots, hits_first=hits_first, device=DelayedDevice(0, late) if late else None)
    for x, weights, ids in steps():
        found = made.layer.compute(x, weights, ids, made.run)
        torch.testing.assert_close(found, made.expect(x, weights, ids), rtol=1e-5, atol=1e-5)
        made.layer.table.check_integrity()
    made.device.close()


def test_a_step_that_fits_is_one_call_of_the_kernel():
    made = make(8, hits_first=False)
    calls = []

    def run(*args):
        calls.append(args[0].shape)
        return made.run(*args)

    for x, weights, ids in steps():
        if len(np.unique(ids)) <= 8:
            calls.clear()
            found = made.layer.compute(x, weights, ids, run)
            assert len(calls) == 1 and torch.equal(found, made.expect(x, weights, ids))
    made.device.close()


def test_counts():
    made = make(6)
    x, weights = torch.randn(1, HIDDEN), torch.ones(1, TOP_K)
    for ids in ([0, 1, 2], [0, 1, 2], [2, 3, 4]):
        made.layer.compute(x, weights, torch.tensor([ids], dtype=torch.int32), made.run)
    stats = made.layer.stats
    assert (stats.hits, stats.misses, stats.steps) == (4, 5, 3)
    assert stats.loaded_bytes == 5 * PAGE
    assert stats.waves == 1 + 1 + 2
    made.device.close()


def test_a_failed_step_fails_all_later_ones():
    made = make(4)
    x, weights = torch.randn(1, HIDDEN), torch.ones(1, TOP_K)
    with pytest.raises(IntegrityError, match="the router named expert 0, 12"):
        made.layer.compute(x, weights, torch.tensor([[0, 1, 12]]), made.run)
    with pytest.raises(IntegrityError, match="an earlier step failed"):
        made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    made.device.close()


def test_without_waiting_for_copies_the_result_is_wrong():
    """The control of the tests above: they would see copies that arrive too late."""
    made = make(5, device=DelayedDevice(0, 0.02))
    made.layer._wait = lambda events: None
    wrong = []
    for x, weights, ids in steps():
        found = made.layer.compute(x, weights, ids, made.run)
        wrong.append(not torch.allclose(found, made.expect(x, weights, ids)))
    assert any(wrong)
    made.device.close()
