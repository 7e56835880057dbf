# SPDX-License-Identifier: Apache-2.0
"""Tests that bounce copies (to a file, or with checksums) run in order with other copies."""

import random

import numpy as np
import pytest

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cuda import bounce_copy
from vllm_tiered.devices.pages import PageError, Pages
from vllm_tiered.errors import ConfigError, IntegrityError

READ, WRITE = Direction.READ, Direction.WRITE
PAGES = Pages(np.arange(20), ascending=True)


@pytest.fixture(params=["kernel", "engines"])
def device(request, monkeypatch):
    monkeypatch.setattr(bounce_copy, "BOUNCE_BYTES", 3 * 64)  # three pages, so 7 pieces
    device = SimulatedCudaDevice(
        random.Random(0),
        haste=0.3,
        engine_run_bytes=0 if request.param == "engines" else 1 << 60,
        num_ids=8,
    )
    yield device
    device.close()


@pytest.fixture(params=["file", "checked"])
def far(request, device, tmp_path):
    if request.param == "file":
        return device.storage_buffer(tmp_path, 20, 64)
    return device.far_buffer(20, 64, verify="full")


def shuffled(seed):
    return Pages(np.random.default_rng(seed).permutation(20))


def test_pages_come_back(device, far):
    near = make_buffer(20)
    written = copy(device, WRITE, near, shuffled(0), far, shuffled(1))
    back = make_buffer(20, value=-1)
    read = copy(device, READ, far, shuffled(1), back, PAGES, [written])
    seen = []
    device.wait(read)
    device.compute(lambda: seen.append(contents(back)))
    device.compute_event().wait()
    assert seen == [shuffled(0).ids.tolist()]
    assert device.failed_pages(read).tolist() == []
    assert device.use(READ).num_bytes == device.use(WRITE).num_bytes == 20 * 64


def test_lost_pages_are_named_and_zero(device, far):
    near = make_buffer(20, value=-1)
    some = pages_of(3, 4, 7, 11, 19)
    written = copy(device, WRITE, make_buffer(20), some, far, some)
    read = copy(device, READ, far, PAGES, near, PAGES, [written])
    read.wait()
    lost = sorted(set(range(20)) - {3, 4, 7, 11, 19})
    assert sorted(device.failed_pages(read).tolist()) == lost
    assert contents(near) == [0 if page in lost else page for page in range(20)]
    assert device.page_errors()[PageError.UNWRITTEN] == len(lost)


def test_a_bounce_copy_waits_and_is_waited_for(device, far):
    """It waits for a deferred event, and copies of plain memory in both directions wait for it."""
    dst, plain = make_buffer(20, value=-1), device.far_buffer(20, 64)
    (deferred_event,) = device.deferred_events(1)
    near = make_buffer(20, value=-1)
    device.compute(lambda: near.words.__setitem__(slice(None), np.arange(20)[:, None]))
    written = copy(device, WRITE, near, PAGES, far, PAGES, [deferred_event])
    behind = copy(device, WRITE, near, PAGES, plain, PAGES)
    read = copy(device, READ, far, PAGES, dst, PAGES, [written])
    across = copy(device, READ, plain, shuffled(0), dst, PAGES, [behind])
    device.cuda.run_all()
    assert not any(event.done() for event in (written, behind, read, across))
    with pytest.raises(IntegrityError, match="waits for later compute"):
        device.wait(across)
    device.signal(deferred_event)
    device.wait(across)
    device.compute_event().wait()
    assert contents(dst) == shuffled(0).ids.tolist()
    assert written.done() and behind.done() and read.done()


def test_a_launch_that_fails_in_the_thread(device, far):
    device.cuda.failures[2] = OSError("link down")
    written = copy(device, WRITE, make_buffer(20), PAGES, far, PAGES)
    behind = copy(device, WRITE, make_buffer(20), PAGES, far, PAGES)
    for event in (written, behind):
        with pytest.raises(OSError, match="link down"):
            event.wait()
        with pytest.raises(OSError, match="link down"):
            device.wait(event)
    device.close()
    assert not device.cuda.pinned


def test_a_copy_whose_end_cannot_be_recorded(device, far, monkeypatch):
    """The worker has copied the pages, but waiters and close() get the error."""
    record = device.cuda.record
    (deferred_event,) = device.deferred_events(1)
    written = copy(device, WRITE, make_buffer(20), PAGES, far, PAGES, [deferred_event])
    behind = copy(device, WRITE, make_buffer(20), PAGES, far, PAGES)

    def failing(raw_event, stream):
        if raw_event is written.raw_event:
            raise OSError("link down")
        record(raw_event, stream)

    monkeypatch.setattr(device.cuda, "record", failing)
    device.signal(deferred_event)
    for event in (written, behind):
        with pytest.raises(OSError, match="link down"):
            event.wait()
    device.close()
    assert not device.cuda.pinned


def test_close_finishes_bounce_copies(device, far):
    near, back = make_buffer(20), make_buffer(20, value=-1)
    written = copy(device, WRITE, near, PAGES, far, PAGES)
    read = copy(device, READ, far, PAGES, back, PAGES, [written])
    never = copy(device, READ, far, PAGES, back, PAGES, device.deferred_events(1))
    device.close()
    device.close()
    assert written.done() and read.done() and contents(back) == list(range(20))
    with pytest.raises(IntegrityError, match="closed before this event"):
        never.wait()


def test_checked_memory_is_not_pinned_and_can_be_released(device):
    far = device.far_buffer(8, 4096, verify="sample")
    assert not device.cuda.pinned
    far.data.fill_(7)
    assert far.discard(0, 8) == 8 * 4096
    with pytest.raises(ConfigError, match=r'kv\.verify is "often"'):
        device.far_buffer(3, 64, "often")
