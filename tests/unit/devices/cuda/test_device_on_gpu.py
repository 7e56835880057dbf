# SPDX-License-Identifier: Apache-2.0
"""Tests of the GPU's device on a GPU: bytes and order. benchmarks/gpu measures its speed."""

import numpy as np
import pytest
import torch

from tests.fixtures.page_buffers import copy, pages_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

READ, WRITE = Direction.READ, Direction.WRITE
PAGE_BYTES = 24 << 10


@pytest.fixture(params=["kernel", "engines", "as-tuned"])
def device(request):
    from vllm_tiered.adapter.device import cuda_device
    from vllm_tiered.devices.cuda.device import CudaDevice

    device = cuda_device()
    assert isinstance(device, CudaDevice)
    if request.param != "as-tuned":
        device._engine_run_bytes = 0 if request.param == "engines" else 1 << 60
    yield device
    device.close()


def near_buffer(num_pages):
    data = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    return PageBuffer(data)


def shuffled(num_pages, seed):
    return Pages(np.random.default_rng(seed).permutation(num_pages))


def test_pages_come_back_bit_by_bit(device):
    """Pages, NaNs included, are written to shuffled far pages and read to other near pages."""
    near, far, back = near_buffer(300), device.far_buffer(300, PAGE_BYTES), near_buffer(300)
    out, into = shuffled(300, 1), shuffled(300, 2)
    computed = device.compute_event()
    written = copy(device, WRITE, near, shuffled(300, 0), far, out, [computed])
    read = copy(device, READ, far, out, back, into, [written])
    device.wait(read)
    order = torch.from_numpy(into.ids).cuda()
    assert torch.equal(back.data[order], near.data[torch.from_numpy(shuffled(300, 0).ids).cuda()])
    assert torch.equal(far.data[torch.from_numpy(out.ids)], back.data[order].cpu())
    assert device.use(READ).num_bytes == device.use(WRITE).num_bytes == 300 * PAGE_BYTES
    assert device.use(READ).busy_seconds > 0


def test_copies_wait_for_later_compute(device):
    """They wait for a deferred event, a copy of the other direction, and long compute."""
    near, far = near_buffer(64), device.far_buffer(64, PAGE_BYTES)
    back, everything = near_buffer(64), Pages(np.arange(64), ascending=True)
    for turn in range(20):
        (deferred_event,) = device.deferred_events(1)
        write = copy(device, WRITE, near, everything, far, everything, [deferred_event])
        read = copy(device, READ, far, everything, back, everything, [write])
        torch.cuda._sleep(2_000_000)
        near.data.fill_(turn)
        device.signal(deferred_event)
        device.wait(read)
        seen = back.data.clone()
        device.wait(device.compute_event())
        assert bool((seen == turn).all())
    (never,) = device.deferred_events(1)
    behind = copy(device, READ, far, everything, back, everything, [never])
    with pytest.raises(IntegrityError):
        device.wait(behind)


def test_the_stall_is_about_the_time_of_the_copy(device):
    """Compute does nothing but wait. A copy that is done before the wait counts as no stall."""
    far, near = device.far_buffer(2000, PAGE_BYTES), near_buffer(2000)
    everything = Pages(np.arange(2000), ascending=True)
    copy(device, READ, far, everything, near, everything).wait()  # Triton compiles the kernel here
    before = device.use(READ).busy_seconds
    read = copy(device, READ, far, everything, near, everything)
    assert device.wait(read) == 0.0
    torch.cuda.synchronize()
    stood_still = device.wait(device.compute_event())
    took = device.use(READ).busy_seconds - before
    assert 0.5 * took < stood_still < 1.5 * took
    torch.cuda._sleep(100_000_000)  # tens of milliseconds: longer than a copy of one page
    device.wait(copy(device, READ, far, pages_of(0), near, pages_of(0)))
    torch.cuda.synchronize()
    assert device.wait(device.compute_event()) == 0.0


def test_far_memory_is_taken_exactly_and_let_go(device):
    """Far memory is allocated and dropped repeatedly; dropped memory can be pinned again."""
    for _ in range(3):
        far = device.far_buffer(1, 1 << 30)
        near = PageBuffer(torch.zeros((1, 1 << 30), dtype=torch.uint8, device="cuda"))
        far.data[0, -8:] = 7
        copy(device, READ, far, pages_of(0), near, pages_of(0)).wait()
        assert near.data[0, -8:].tolist() == [7] * 8
        assert far.discard(0, 1) == 0
        device.use(READ)  # this notices that the copy is done
        del far, near
