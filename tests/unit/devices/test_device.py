# SPDX-License-Identifier: Apache-2.0
"""Tests of the device contract in ``devices/base.py``, run on every device."""

import threading
import time

import numpy as np
import pytest

from tests.fixtures.numa_machines import MACHINES
from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.pages import Pages
from vllm_tiered.errors import IntegrityError

READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture(params=sorted(MACHINES))
def machine(request):
    machine = MACHINES[request.param]()
    yield machine
    machine.device.close()


@pytest.fixture
def device(machine):
    return machine.device


def finish(device):
    """Wait until both directions have done all copies submitted so far."""
    nothing = make_buffer(0)
    for direction in Direction:
        copy(device, direction, nothing, pages_of(), nothing, pages_of()).wait()


def test_a_source_page_may_be_copied_to_many(device):
    dst = make_buffer(3, value=-1)
    copy(device, READ, make_buffer(5), pages_of(4, 4, 0), dst, pages_of(0, 1, 2)).wait()
    assert contents(dst) == [4, 4, 0]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("src_ids", "dst_ids"),
    [((0, 4), (0, 1)), ((0, 1), (2, 3)), ((-1, 0), (0, 1)), ((0, 1), (-1, 0))],
    ids=["source-above", "target-above", "source-below", "target-below"],
)
def test_page_ids_out_of_range_are_refused(device, direction, src_ids, dst_ids):
    src, dst = make_buffer(4), make_buffer(3, value=-1)
    with pytest.raises(IntegrityError, match=r"page ids -?\d to \d out of [34] pages"):
        copy(device, direction, src, pages_of(*src_ids), dst, pages_of(*dst_ids))
    finish(device)
    assert contents(dst) == [-1] * 3
    assert device.use(direction).num_bytes == 0


def test_far_buffer_has_exactly_that_size(device):
    far = device.far_buffer(3, 4096)
    assert far.data.shape == (3, 4096) and far.words is not None
    assert device.far_buffer(0, 4096).num_pages == 0


@pytest.mark.parametrize("direction", Direction)
def test_copies_of_a_direction_run_in_the_order_of_submission(machine, direction):
    device, held, dst = machine.device, machine.hold_up(), make_buffer(1, value=-1)
    first = copy(device, direction, make_buffer(9), pages_of(3), dst, pages_of(0), [held.event])
    second = copy(device, direction, make_buffer(9), pages_of(5), dst, pages_of(0))
    held.run()
    assert not first.done() and not second.done() and contents(dst) == [-1]
    held.open()
    second.wait()
    assert first.done() and contents(dst) == [5]


@pytest.mark.parametrize(("first", "then"), [(READ, WRITE), (WRITE, READ)])
def test_after_orders_copies_across_directions(machine, first, then):
    device, held = machine.device, machine.hold_up()
    middle, dst = make_buffer(1, value=-1), make_buffer(1, value=-1)
    before = copy(device, first, make_buffer(9), pages_of(7), middle, pages_of(0), [held.event])
    after = copy(device, then, middle, pages_of(0), dst, pages_of(0), [before])
    held.run()
    assert not after.done() and contents(dst) == [-1]
    held.open()
    after.wait()
    assert before.done() and contents(dst) == [7]


@pytest.mark.parametrize(("held_up", "free"), [(READ, WRITE), (WRITE, READ)])
def test_directions_do_not_hold_each_other_up(machine, held_up, free):
    device, held, dst = machine.device, machine.hold_up(), make_buffer(2, value=-1)
    late = copy(device, held_up, make_buffer(9), pages_of(1), dst, pages_of(0), [held.event])
    copy(device, free, make_buffer(9), pages_of(2), dst, pages_of(1)).wait()
    held.run()
    assert not late.done() and contents(dst) == [-1, 2]
    held.open()
    late.wait()


def test_copies_wait_for_a_deferred_event(device):
    """Later copies of the same direction wait as well."""
    dst = make_buffer(2, value=-1)
    first, second = device.deferred_events(2)
    copy(device, WRITE, make_buffer(9), pages_of(3), dst, pages_of(0), [first])
    event = copy(device, WRITE, make_buffer(9), pages_of(5), dst, pages_of(1), [second])
    device.signal(second)
    time.sleep(0.01)
    assert not event.done() and contents(dst) == [-1, -1]
    device.signal(first)
    event.wait()
    assert contents(dst) == [3, 5]


def test_a_prepared_copy_may_be_submitted_again(device):
    src, dst = make_buffer(4), make_buffer(1, value=-1)
    prepared = device.prepare(READ, src, pages_of(2), dst, pages_of(0))
    for value in (7, 8):
        assert src.words is not None
        src.words[2] = value
        event = device.submit(prepared)
        event.wait()
        assert contents(dst) == [value]


def test_use_counts_each_direction(device):
    big = make_buffer(64, 1 << 16)
    pages = Pages(np.arange(32))
    for _ in range(3):
        copy(device, READ, big, pages, big, Pages(np.arange(32, 64)))
    copy(device, WRITE, big, pages_of(1), big, pages_of(2))
    finish(device)
    assert device.use(READ).num_bytes == 3 * 32 << 16
    assert device.use(WRITE).num_bytes == 1 << 16
    assert device.use(READ).busy_seconds > 0.0


def test_close_fails_copies_that_wait_for_missing_compute(device):
    """A step that raises partway must not leave a thread that cannot be stopped."""
    dst = make_buffer(1, value=-1)
    reached, never = device.deferred_events(2)
    done = copy(device, WRITE, make_buffer(1), pages_of(0), dst, pages_of(0), [reached])
    behind = copy(device, WRITE, make_buffer(9), pages_of(5), dst, pages_of(0), [never])
    device.signal(reached)
    device.deferred_events(3)  # of a later step
    device.close()
    assert done.done() and contents(dst) == [0]
    with pytest.raises(IntegrityError, match="closed before this event was signalled"):
        behind.wait()


def test_a_closed_device_refuses_copies(device):
    device.close()
    buffer = make_buffer(1)
    with pytest.raises(IntegrityError):
        copy(device, READ, buffer, pages_of(0), buffer, pages_of(0))


def test_close_finishes_all_copies_and_may_be_called_again(device):
    dst = make_buffer(20, value=-1)
    events = [
        copy(device, direction, make_buffer(20), pages_of(page), dst, pages_of(page))
        for page in range(20)
        for direction in (Direction(("read", "write")[page % 2]),)
    ]
    device.close()
    device.close()
    assert all(event.done() for event in events)
    assert contents(dst) == list(range(20))


def test_a_thread_may_wait_for_a_copy_that_is_held_up(machine):
    held, dst = machine.hold_up(), make_buffer(1, value=-1)
    event = copy(machine.device, WRITE, make_buffer(9), pages_of(4), dst, pages_of(0), [held.event])
    held.run()
    opener = threading.Timer(0.02, held.open)
    waiter = threading.Thread(target=event.wait)
    for thread in (opener, waiter):
        thread.start()
    for thread in (opener, waiter):
        thread.join(timeout=30)
    assert event.done() and contents(dst) == [4]


def test_different_numbers_of_pages_are_refused(device):
    src, dst = make_buffer(3), make_buffer(3, value=-1)
    with pytest.raises(IntegrityError):
        copy(device, READ, src, pages_of(0, 1, 2), dst, pages_of(0, 1))


def test_pages_of_different_sizes_are_refused(device):
    src, dst = make_buffer(3), make_buffer(3, 128, value=-1)
    with pytest.raises(IntegrityError, match="pages of 64 bytes to copy to 128"):
        copy(device, READ, src, pages_of(0), dst, pages_of(0))


def test_plain_memory_loses_no_pages(device):
    buffer = make_buffer(2)
    event = copy(device, READ, buffer, pages_of(0), buffer, pages_of(1))
    event.wait()
    assert device.failed_pages(event).tolist() == []
    assert device.failed_pages(device.compute_event()).tolist() == []
