# SPDX-License-Identifier: Apache-2.0
"""Tests that the fake CUDA runtime has CUDA's semantics, especially the error-prone ones."""

import random

import pytest
import torch

from tests.fakes.cuda import POISON, SimulatedCuda


def make_cuda(haste=0.0):
    return SimulatedCuda(random.Random(0), haste=haste, checks_memory=False)


def note(cuda, stream, log, what):
    """Submit a kernel to a stream; it logs ``what`` when it runs."""
    here, cuda._compute = cuda._compute, stream
    cuda.compute(lambda: log.append(what))
    cuda._compute = here


def test_a_stream_does_not_wait_for_an_event_that_was_not_recorded():
    cuda = make_cuda()
    log: list[object] = []
    stream, raw_event = cuda.new_stream(), cuda.new_event()
    cuda.stream_wait(stream, raw_event)
    note(cuda, stream, log, "behind")
    assert cuda.is_done(raw_event)
    cuda.synchronize(raw_event)
    cuda.hold_compute()
    cuda.record(raw_event, cuda.compute_stream())
    cuda.run_all()
    assert log == ["behind"] and not cuda.is_done(raw_event)


def test_a_second_recording_counts_for_later_waits():
    cuda = make_cuda()
    log: list[object] = []
    early, late, raw_event = cuda.new_stream(), cuda.new_stream(), cuda.new_event()
    cuda.record(raw_event, cuda.compute_stream())
    cuda.stream_wait(early, raw_event)
    open_compute = cuda.hold_compute()
    cuda.record(raw_event, cuda.compute_stream())
    cuda.stream_wait(late, raw_event)
    note(cuda, early, log, "early")
    note(cuda, late, log, "late")
    cuda.run_all()
    assert log == ["early"] and not cuda.is_done(raw_event)
    open_compute()
    cuda.run_all()
    assert log == ["early", "late"] and cuda.is_done(raw_event)


def test_streams_are_delayed_and_keep_their_own_order():
    orders = set()
    for seed in range(20):
        cuda = SimulatedCuda(random.Random(seed), haste=0.5)
        log: list[object] = []
        streams = [cuda.new_stream() for _ in range(2)]
        for turn in range(3):
            for number, stream in enumerate(streams):
                note(cuda, stream, log, (number, turn))
        cuda.run_all()
        for number in range(2):
            assert [one for one in log if one in [(number, n) for n in range(3)]] == [
                (number, n) for n in range(3)
            ]
        orders.add(tuple(log))
    assert len(orders) > 5


def ids_in_pinned_memory(cuda, *ids):
    tensor = torch.tensor([*ids, 0, 0])
    cuda.pin_memory(tensor.data_ptr(), tensor.numel() * 8)
    return tensor[: len(ids)]


@pytest.mark.parametrize("by", ["kernel", "engine"])
def test_a_copy_is_made_when_it_runs_and_poisons_its_target_before(by):
    cuda, seen = make_cuda(), []
    stream = cuda.new_stream()
    src, dst = torch.arange(8, dtype=torch.int32).view(4, 2), torch.zeros((4, 2), dtype=torch.int32)
    src_ids, dst_ids = (ids_in_pinned_memory(cuda, 0, 1) for _ in range(2))
    if by == "kernel":
        cuda.copy_pages(stream, src, src_ids, dst, dst_ids)
    else:
        cuda.copy_run(stream, src[2:].view(torch.uint8), dst[:2].view(torch.uint8))
    src[2:] += 10
    src_ids += 2
    while stream:
        cuda._advance(stream[0])
        seen.append(dst.tolist())
    assert seen[0] == [[POISON, POISON]] * 2 + [[0, 0]] * 2
    assert seen[-1] == [[14, 15], [16, 17], [0, 0], [0, 0]]


def test_errors_that_would_crash_a_gpu_are_found():
    cuda = SimulatedCuda(random.Random(0), haste=0.0)
    stream, pages = cuda.new_stream(), torch.zeros((4, 2), dtype=torch.int32)
    ids = ids_in_pinned_memory(cuda, 0, 9)
    with pytest.raises(AssertionError, match="illegal memory access"):
        cuda.copy_pages(stream, pages, ids, pages.clone(), ids)
    far = pages.clone()
    cuda.pin_memory(far.data_ptr(), 32)
    with pytest.raises(AssertionError, match="ids"):
        cuda.copy_pages(stream, far, torch.tensor([0, 1]), pages, ids)
    cuda.copy_pages(stream, far, ids, pages, ids)
    with pytest.raises(AssertionError, match="while in use"):
        cuda.unpin_memory(far.data_ptr())
    with pytest.raises(AssertionError, match="illegal memory access"):
        cuda.run_all()


def test_a_wait_without_a_signal_does_not_hang():
    cuda = make_cuda()
    cuda.patience_seconds = 0.01
    cuda.hold_compute()
    raw_event = cuda.new_event()
    cuda.record(raw_event, cuda.compute_stream())
    with pytest.raises(AssertionError, match="never opened"):
        cuda.synchronize(raw_event)
