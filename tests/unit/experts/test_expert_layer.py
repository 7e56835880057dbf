# SPDX-License-Identifier: Apache-2.0
"""A layer's result does not depend on slots, tiers or the order in which copies arrive."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.fakes.devices import DelayedDevice
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import IntegrityError
from vllm_tiered.experts.fallback import Fallback, pairs_not_loaded
from vllm_tiered.experts.layer import ExpertLayer, HostRows, PagedRows, _with_a_short_end
from vllm_tiered.experts.policy import Lru
from vllm_tiered.experts.slot_table import SlotTable, Wave
from vllm_tiered.storage.direct_file import aligned_pages

NUM_EXPERTS, TOP_K, HIDDEN, PAGE = 12, 3, 32, 4096


def make(num_slots, *, device=None, is_stored=True, fallback=None):
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
                PageBuffer(rows.view(torch.uint8).view(-1, PAGE)),
                PageBuffer(memory),
                np.arange(num_slots)[:, None],
                1,
            )
        ],
        host=[HostRows(bias, slot_bias)],
        is_stored=is_stored,
        fallback=fallback,
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
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("late", [0.0, 0.002])
def test_the_result_is_that_of_all_experts(num_slots, is_stored, late):
    made = make(num_slots, is_stored=is_stored, device=DelayedDevice(0, late) if late else None)
    for x, weights, ids in steps():
        found = made.layer.compute(x, weights, ids, made.run)
        torch.testing.assert_close(found, made.expect(x, weights, ids), rtol=1e-5, atol=1e-5)
        made.layer.table.check_integrity()
    made.device.close()


def test_a_step_that_fits_is_one_call_of_the_kernel():
    made = make(8, is_stored=False)
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


@pytest.mark.parametrize("num_slots", [TOP_K + 1, 5, 8])
@pytest.mark.parametrize("late", [0.0, 0.002])
def test_the_result_does_not_depend_on_what_was_loaded_ahead(num_slots, late):
    made = make(num_slots, device=DelayedDevice(0, late) if late else None)
    rng = np.random.default_rng(0)
    for x, weights, ids in steps(24):
        made.layer.load_ahead(rng.permutation(NUM_EXPERTS)[:4])
        found = made.layer.compute(x, weights, ids, made.run)
        torch.testing.assert_close(found, made.expect(x, weights, ids), rtol=1e-5, atol=1e-5)
        made.layer.table.check_integrity()
    stats = made.layer.stats
    assert 0 < stats.ahead_used < stats.ahead
    assert stats.ahead_bytes == stats.ahead * PAGE
    made.device.close()


def test_loads_ahead_that_nobody_waits_for_make_the_result_wrong():
    """The control of the test above."""
    made = make(5, device=DelayedDevice(0, 0.0))
    x, weights = torch.randn(1, HIDDEN), torch.ones(1, TOP_K)
    made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    made.device.thread_class.delay = lambda thread: time.sleep(0.1)
    made.layer.load_ahead(np.array([3]))
    made.layer._take_ahead = lambda hits: []
    ids = torch.tensor([[1, 2, 3]])
    found = made.layer.compute(x, weights, ids, made.run)
    assert not torch.allclose(found, made.expect(x, weights, ids))
    made.device.close()


def test_an_expert_that_is_loaded_ahead_is_a_hit_and_takes_no_slot_in_use():
    made = make(4)
    x, weights = torch.randn(1, HIDDEN), torch.ones(1, TOP_K)

    def wait():  # the link is busy until then, and nothing would be loaded ahead
        for events in made.layer._ahead.values():
            for event in events:
                event.wait()

    made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    made.layer.load_ahead(np.array([7, 8]))  # one, as nothing is known of the link yet
    assert (made.layer.table.slot_of[[0, 1, 2, 7]] >= 0).all()
    wait()
    made.layer.load_ahead(np.array([8]))  # 7 was not in the last step
    assert (made.layer.table.slot_of[[0, 1, 2, 8]] >= 0).all()
    wait()
    made.layer.load_ahead(np.array([9, 8]))  # 8 is a candidate, and no other slot is idle
    assert made.layer.table.slot_of[9] < 0 <= made.layer.table.slot_of[8]
    made.layer.compute(x, weights, torch.tensor([[0, 1, 8]]), made.run)
    stats = made.layer.stats
    assert (stats.hits, stats.misses) == (3, 3)
    assert (stats.ahead, stats.ahead_used) == (2, 1)
    made.device.close()


def test_a_page_lost_ahead_is_an_error_only_for_a_step_that_wants_it(monkeypatch):
    made = make(5)
    x, weights = torch.randn(1, HIDDEN), torch.ones(1, TOP_K)
    made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    made.layer.load_ahead(np.array([7]))
    (events,) = made.layer._ahead.values()
    monkeypatch.setattr(
        made.device, "failed_pages", lambda event: np.array([7] if event in events else [])
    )
    made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    with pytest.raises(IntegrityError, match=r"pages \[7\] of its experts are lost"):
        made.layer.compute(x, weights, torch.tensor([[0, 1, 7]]), made.run)
    made.device.close()


def test_a_slot_that_changes_hands_while_a_load_ahead_is_late():
    """Expert 7 is on its way to the only idle slot when the step's expert 8 takes it."""
    made = make(4, device=DelayedDevice(0, 0.02))
    x, weights = torch.randn(1, HIDDEN), torch.ones(1, TOP_K)
    made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    made.layer.load_ahead(np.array([7]))
    for named in ([[0, 1, 8]], [[0, 1, 7]], [[1, 7, 8]]):
        ids = torch.tensor(named)
        found = made.layer.compute(x, weights, ids, made.run)
        torch.testing.assert_close(found, made.expect(x, weights, ids), rtol=1e-5, atol=1e-5)
        made.layer.table.check_integrity()
    assert made.layer.stats.ahead_used == 0 and not made.layer._ahead
    made.device.close()


def test_the_next_layer_is_asked_once_all_experts_have_arrived():
    made = make(4, device=DelayedDevice(0, 0.002))
    calls = []

    def asked(x_MH):
        calls.append(x_MH)
        slots = made.layer.table.slot_of[[0, 1, 2]]
        assert not made.layer._paged[0].slots.data[slots].view(torch.float32).isnan().any()

    made.layer.look_ahead = asked
    x, weights = torch.randn(1, HIDDEN), torch.ones(1, TOP_K)
    made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    assert len(calls) == 2 and all(call is x for call in calls)
    made.device.close()


def test_missing_experts_of_little_weight_are_not_loaded():
    seen = []

    def run(x_PH, weights_P1, ids_P1):
        seen.extend(ids_P1.flatten().tolist())
        return 1000 * weights_P1 * torch.ones_like(x_PH)

    made = make(4, fallback=Fallback(0.3, run))
    x = torch.randn(1, HIDDEN)
    weights = torch.tensor([[0.2, 0.5, 0.3]])
    found = made.layer.compute(x, weights, torch.tensor([[0, 1, 2]]), made.run)
    exact = made.expect(x, weights[:, 1:], torch.tensor([[1, 2]]))
    torch.testing.assert_close(found, exact + 200.0)
    assert seen == [0]
    stats = made.layer.stats
    assert (stats.misses, stats.pairs, stats.fallback_pairs) == (2, 3, 1)
    # Expert 1 has a slot, and the second token needs expert 3.
    both = torch.tensor([[1, 3, 4], [3, 1, 2]])
    weights = torch.tensor([[0.6, 0.2, 0.2], [0.6, 0.2, 0.2]])
    weights[0, 1:] = torch.tensor([0.25, 0.15])
    x = torch.randn(2, HIDDEN)
    found = made.layer.compute(x, weights, both, made.run)
    assert seen == [0, 4]
    expected = made.expect(x, weights * torch.tensor([[1, 1, 0], [1, 1, 1]]), both)
    expected[0] += 150.0
    torch.testing.assert_close(found, expected)
    made.device.close()


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_no_token_has_more_than_its_share_in_4_bit(share):
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = rng.random((5, TOP_K), dtype=np.float32)
        ids = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(5)])
        is_missing = rng.random(NUM_EXPERTS) < 0.7
        skipped = pairs_not_loaded(weights, ids, is_missing, share)
        assert not skipped[~is_missing[ids]].any()
        of_token = (weights * skipped).sum(1)
        assert (of_token <= share * weights.sum(1) + 1e-6).all()
        # An expert is either loaded for all tokens or for none.
        assert not set(ids[skipped]) & set(ids[~skipped])
        if share == 1.0:
            assert (skipped == is_missing[ids]).all()


def test_ids_that_the_gpu_met_and_that_are_no_experts_are_an_error():
    layer = make(5).layer
    layer.count_on_device(1, 3, 2, 3, 0)
    assert (layer.stats.hits, layer.stats.misses, layer.stats.pairs) == (1, 2, 3)
    with pytest.raises(IntegrityError, match="named 2 experts that are none"):
        layer.count_on_device(1, 3, 0, 3, 2)


@pytest.mark.parametrize(
    ("misses", "parts"), [(0, [2]), (1, [2, 1]), (2, [2, 1, 1]), (8, [2, 6, 2])]
)
@pytest.mark.parametrize("after", [None, 0])
def test_the_last_wave_ends_with_a_short_part(misses, parts, after):
    hits = Wave(np.array([0, 1]), np.array([3, 5]), None)
    loaded = Wave(np.arange(2, 2 + misses), np.arange(6, 6 + misses), after)
    waves = _with_a_short_end([hits, loaded] if misses else [hits])
    assert [len(wave.experts) for wave in waves] == parts and waves[0] is hits
    assert [e for wave in waves[1:] for e in wave.experts] == loaded.experts.tolist()
    assert [e for wave in waves[1:] for e in wave.slots] == loaded.slots.tolist()
    assert {wave.after for wave in waves[1:]} <= {after}
