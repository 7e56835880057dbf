# SPDX-License-Identifier: Apache-2.0
"""Tests specific to the GPU's device, on a fake CUDA runtime."""

import random

import pytest

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction, Event, LinkUse
from vllm_tiered.devices.cuda.copy import joint_runs
from vllm_tiered.errors import IntegrityError

READ, WRITE = Direction.READ, Direction.WRITE


def make_device(haste=0.0, **options):
    """Make a device on which, by default, only operations that are waited for run."""
    return SimulatedCudaDevice(random.Random(0), haste=haste, checks_memory=False, **options)


@pytest.fixture
def device():
    device = make_device()
    yield device
    device.close()


# Within a step -------------------------------------------------------------------------


def test_nothing_in_a_step_waits_for_the_gpu(device, monkeypatch):
    """All calls return while the GPU runs nothing, whether copies are held back or not."""
    dst = make_buffer(40, value=-1)
    with monkeypatch.context() as patched:
        patched.setattr(device.cuda, "synchronize", lambda raw_event: pytest.fail("the host waits"))
        events: list[Event] = []
        for page in range(40):
            (deferred_event,) = device.deferred_events(1)
            after = (deferred_event, device.compute_event(), *events[-1:])
            direction = list(Direction)[page % 2]
            pages = pages_of(page)
            events.append(copy(device, direction, make_buffer(40), pages, dst, pages, after))
            device.signal(deferred_event)
            device.wait(events[-1])
            assert device.use(direction) == LinkUse()
        assert not any(event.done() for event in events)
    events[-1].wait()
    assert contents(dst) == list(range(40))


def test_standstill_is_counted_when_it_is_known(device):
    dst = make_buffer(2, value=-1)
    event = copy(device, READ, make_buffer(2), pages_of(1), dst, pages_of(0))
    ran = []
    assert device.wait(event) == 0.0, "compute has not come there yet"
    device.compute(lambda: ran.append(contents(dst)[0]))
    device.compute_event().wait()
    assert ran == [1]
    stood_still = device.wait(device.compute_event())
    assert stood_still > 0.0
    assert device.wait(device.compute_event()) == 0.0, "counted twice"


def test_copies_that_are_done_first_cost_nothing(device):
    open_compute = device.cuda.hold_compute()
    dst = make_buffer(2, value=-1)
    event = copy(device, READ, make_buffer(2), pages_of(1), dst, pages_of(0))
    assert device.wait(event) == 0.0
    device.cuda.run_all()
    open_compute()
    device.cuda.run_all()
    assert device.wait(event) == 0.0
    assert not device._waits


def test_compute_that_would_wait_for_itself_is_refused(device):
    (deferred_event,) = device.deferred_events(1)
    buffer = make_buffer(2)
    write = copy(device, WRITE, buffer, pages_of(0), buffer, pages_of(1), [deferred_event])
    read = copy(device, READ, buffer, pages_of(1), buffer, pages_of(0), [write])
    with pytest.raises(IntegrityError, match="waits for later compute"):
        device.wait(read)
    device.signal(deferred_event)
    with pytest.raises(IntegrityError, match="signalled twice"):
        device.signal(deferred_event)


def test_busy_seconds_are_those_of_the_copies(device):
    open_compute = device.cuda.hold_compute()
    buffer = make_buffer(2)
    after = (device.compute_event(),)
    copy(device, READ, buffer, pages_of(0), buffer, pages_of(1), after)
    for _ in range(50):
        device.compute(lambda: None)
    open_compute()
    device.compute_event().wait()  # 50 ticks of the fake's clock, in which the copy does not run
    device.cuda.run_all()
    used = device.use(READ)
    assert used.num_bytes == 64
    assert 0 < used.busy_seconds < 0.02


# By kernel and by copy engine -----------------------------------------------------------


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "runs"),
    [
        ((), (), []),
        ((5,), (2,), [(5, 2, 1)]),
        ((1, 2, 3), (4, 5, 6), [(1, 4, 3)]),
        ((1, 2, 3), (4, 5, 9), [(1, 4, 2), (3, 9, 1)]),
        ((1, 2, 8), (4, 5, 6), [(1, 4, 2), (8, 6, 1)]),
        ((3, 2), (2, 3), [(3, 2, 1), (2, 3, 1)]),
        ((4, 4), (0, 1), [(4, 0, 1), (4, 1, 1)]),
    ],
)
def test_runs_are_consecutive_on_both_sides(src_ids, dst_ids, runs):
    assert joint_runs(pages_of(*src_ids), pages_of(*dst_ids)) == runs


@pytest.mark.parametrize(
    ("src_ids", "launches"),
    [
        ((3, 4, 5, 6), {"kernel": 0, "engine": 1}),
        ((3, 4, 7, 8), {"kernel": 0, "engine": 2}),
        ((3, 4, 5, 8), {"kernel": 0, "engine": 2}),
        ((3, 5, 7, 8), {"kernel": 1, "engine": 0}),
        ((3,), {"kernel": 1, "engine": 0}),
    ],
)
def test_copy_engines_take_long_runs(src_ids, launches):
    device = make_device(engine_run_bytes=2 * 64)
    dst = make_buffer(4, value=-1)
    targets = pages_of(*range(len(src_ids)))
    copy(device, READ, make_buffer(9), pages_of(*src_ids), dst, targets).wait()
    assert device.cuda.num_launches == launches
    assert contents(dst)[: len(src_ids)] == list(src_ids)
    device.close()


# Errors ---------------------------------------------------------------------------------


class LinkDown(Exception):
    pass


@pytest.mark.parametrize("engine_run_bytes", [1 << 60, 0], ids=["kernel", "engine"])
def test_a_failed_launch_fails_later_copies(engine_run_bytes):
    device = make_device(engine_run_bytes=engine_run_bytes)
    device.cuda.failures[3] = LinkDown()
    far, dst = device.far_buffer(9, 64), make_buffer(9, value=-1)
    (deferred_event,) = device.deferred_events(1)
    pages = pages_of(3, 5)  # two runs; copy engines launch the second one third, and it fails
    copy(device, WRITE, make_buffer(9), pages_of(0), far, pages_of(0))
    failed = copy(device, READ, far, pages, dst, pages, [deferred_event])
    behind = copy(device, READ, far, pages_of(1), dst, pages_of(1))
    across = copy(device, WRITE, dst, pages_of(1), far, pages_of(2), [behind])
    device.signal(deferred_event)
    if engine_run_bytes:  # the kernel copies both runs at once: the next launch is the third
        assert not failed.done()
        failed = behind
    for event in (failed, behind, across):
        for look in (event.done, event.wait, lambda event=event: device.wait(event)):
            with pytest.raises(LinkDown):
                look()
    last = copy(device, WRITE, make_buffer(9), pages_of(0), far, pages_of(0))
    with pytest.raises(LinkDown):
        last.wait()
    device.close()
    assert not device.cuda.pinned
    assert device.use(WRITE).num_bytes == 64


def test_close_waits_for_kernels_that_read_far_memory():
    """Such kernels may be the last work submitted, and nothing has waited for them."""
    device = make_device()
    far = device.far_buffer(4, 64)
    address, was_there = far.data.data_ptr(), []
    device.compute(lambda: was_there.append(address in device.cuda.pinned))
    assert not was_there
    device.close()
    assert was_there == [True] and not device.cuda.pinned
