# SPDX-License-Identifier: Apache-2.0
"""The CPU's device: what is copied, in which order, and that compute goes on meanwhile."""

import os
import sys
import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.tiers.buffers import contents, copy, make_buffer, pages_of
from tests.tiers.gate import Gate
from vllm_tiered.errors import BudgetError, IntegrityError
from vllm_tiered.tiers.base import Direction, LinkUse, Pages
from vllm_tiered.tiers.cpu import CpuDevice, CpuEvent, copy_pages

READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


def finish(device):
    """Wait until both threads have done all that was submitted so far."""
    nothing = make_buffer(0)
    for direction in Direction:
        copy(device, direction, nothing, pages_of(), nothing, pages_of()).wait()


# What is copied --------------------------------------------------------------------------


@given(data=st.data(), count=st.integers(0, 12))
def test_copy_pages(data, count):
    ids = st.lists(st.integers(0, 15), unique=True, min_size=count, max_size=count)
    src_ids, dst_ids = data.draw(ids), data.draw(ids)
    dst = make_buffer(16, value=-1)
    copy_pages(make_buffer(16), pages_of(*src_ids), dst, pages_of(*dst_ids))
    expected = [-1] * 16
    for src_id, dst_id in zip(src_ids, dst_ids, strict=True):
        expected[dst_id] = src_id
    assert contents(dst) == expected


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


def test_far_buffer_that_no_machine_has(device):
    with pytest.raises(BudgetError, match=r"4194304\.00 GiB .*lower kv\.far_gib"):
        device.far_buffer(2**40, 2**12)


# In which order --------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
def test_copies_of_a_direction_run_in_the_order_of_submission(device, direction):
    gate, dst = Gate(), make_buffer(1, value=-1)
    first = copy(device, direction, make_buffer(9), pages_of(3), dst, pages_of(0), [gate])
    second = copy(device, direction, make_buffer(9), pages_of(5), dst, pages_of(0))
    assert gate.waited_for.wait(timeout=60)
    assert not first.done() and not second.done() and contents(dst) == [-1]
    gate.open()
    second.wait()
    assert first.done() and contents(dst) == [5]


@pytest.mark.parametrize(("first", "then"), [(READ, WRITE), (WRITE, READ)])
def test_after_orders_copies_across_directions(device, first, then):
    gate, middle, dst = Gate(), make_buffer(1, value=-1), make_buffer(1, value=-1)
    before = copy(device, first, make_buffer(9), pages_of(7), middle, pages_of(0), [gate])
    after = copy(device, then, middle, pages_of(0), dst, pages_of(0), [before])
    assert gate.waited_for.wait(timeout=60)
    assert not after.done() and contents(dst) == [-1]
    gate.open()
    after.wait()
    assert before.done() and contents(dst) == [7]


@pytest.mark.parametrize(("held_up", "free"), [(READ, WRITE), (WRITE, READ)])
def test_directions_do_not_hold_each_other_up(device, held_up, free):
    gate, dst = Gate(), make_buffer(2, value=-1)
    late = copy(device, held_up, make_buffer(9), pages_of(1), dst, pages_of(0), [gate])
    copy(device, free, make_buffer(9), pages_of(2), dst, pages_of(1)).wait()
    assert not late.done() and contents(dst) == [-1, 2]
    gate.open()
    late.wait()


def test_wait_returns_the_time_that_compute_stood_still(device):
    gate, buffer = Gate(), make_buffer(1)
    event = copy(device, READ, buffer, pages_of(), buffer, pages_of(), [gate])
    assert gate.waited_for.wait(timeout=60)
    opener = threading.Timer(0.02, gate.open)
    opener.start()
    assert device.wait(event) > 0.0
    opener.join()
    assert device.wait(event) == 0.0


def test_compute_is_over_when_it_returns(device):
    event = device.compute_event()
    event.wait()
    assert event.done() and device.wait(event) == 0.0


def test_copies_wait_for_a_milestone(device):
    dst = make_buffer(2, value=-1)
    first, second = device.milestones(2)
    copy(device, WRITE, make_buffer(9), pages_of(3), dst, pages_of(0), [first])
    event = copy(device, WRITE, make_buffer(9), pages_of(5), dst, pages_of(1), [second])
    device.reach(second)
    time.sleep(0.01)
    assert not event.done() and contents(dst) == [-1, -1]
    device.reach(first)
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


# Threads and errors ----------------------------------------------------------------------


def test_copying_threads_may_run_where_they_are_told():
    where: list[set[int]] = []

    class Look(Gate):
        def wait(self):
            where.append(os.sched_getaffinity(0))

    cpu = max(os.sched_getaffinity(0))
    own = os.sched_getaffinity(0)
    device = CpuDevice(cpus={cpu})
    buffer = make_buffer(1)
    for direction in Direction:
        copy(device, direction, buffer, pages_of(), buffer, pages_of(), [Look()]).wait()
    device.close()
    assert where == [{cpu}, {cpu}]
    assert os.sched_getaffinity(0) == own


def test_an_error_reaches_all_who_look_at_the_event(device):
    gate, buffer = Gate(), make_buffer(2)
    gate.fail(OSError("link down"))
    event = copy(device, READ, buffer, pages_of(0), buffer, pages_of(1), [gate])
    for look in (event.wait, event.done, lambda: device.wait(event)):
        with pytest.raises(OSError, match="link down"):
            look()


def test_an_error_reaches_copies_that_come_after(device):
    gate, buffer, dst = Gate(), make_buffer(2), make_buffer(1, value=-1)
    gate.fail(OSError("link down"))
    failed = copy(device, WRITE, buffer, pages_of(0), buffer, pages_of(1), [gate])
    after = copy(device, READ, buffer, pages_of(1), dst, pages_of(0), [failed])
    with pytest.raises(OSError, match="link down"):
        after.wait()
    assert contents(dst) == [-1]
    assert device.use(READ) == device.use(WRITE) == LinkUse()


def test_an_error_reaches_later_copies_of_its_direction(device):
    """Who waits for the last of many copies, as they are in order, must learn of it."""
    gate, buffer = Gate(), make_buffer(2)
    gate.fail(OSError("link down"))
    copy(device, WRITE, buffer, pages_of(0), buffer, pages_of(1), [gate])
    last = copy(device, WRITE, buffer, pages_of(0), buffer, pages_of(1))
    with pytest.raises(OSError, match="link down"):
        last.wait()


@pytest.mark.parametrize("line", [0, 1])
def test_done_never_says_yes_to_a_copy_that_fails_meanwhile(line):
    """The copying thread fails just before a line of ``done`` runs."""
    event = CpuEvent()
    lines_seen: list[int] = []

    def trace(frame, what, _):
        if frame.f_code is not CpuEvent.done.__code__:
            return None
        if what == "line":
            if len(lines_seen) == line:
                event.finish(OSError("link down"))
            lines_seen.append(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        said = event.done()
    except OSError:
        said = False
    finally:
        sys.settrace(before)
    assert len(lines_seen) > line
    assert said is False


# Books and end ---------------------------------------------------------------------------


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


def test_time_spent_waiting_is_not_busy_time(device):
    gate, buffer = Gate(), make_buffer(1)
    event = copy(device, READ, buffer, pages_of(0), buffer, pages_of(0), [gate])
    assert gate.waited_for.wait(timeout=60)
    begin = time.perf_counter()
    time.sleep(0.05)
    gate.open()
    event.wait()
    assert device.use(READ).busy_seconds < time.perf_counter() - begin - 0.04


def test_close_finishes_all_copies_and_may_be_called_again():
    threads_before = set(threading.enumerate())
    device = CpuDevice()
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
    assert set(threading.enumerate()) <= threads_before


def test_close_fails_what_waits_for_compute_that_never_came():
    """A step that raises in its middle must not leave a thread behind that nobody can end."""
    device, dst = CpuDevice(), make_buffer(1, value=-1)
    reached, never = device.milestones(2)
    done = copy(device, WRITE, make_buffer(1), pages_of(0), dst, pages_of(0), [reached])
    behind = copy(device, WRITE, make_buffer(9), pages_of(5), dst, pages_of(0), [never])
    device.reach(reached)
    device.milestones(3)  # of a later step
    device.close()
    assert done.done() and contents(dst) == [0]
    with pytest.raises(IntegrityError, match="closed before compute came here"):
        behind.wait()


def test_a_closed_device_refuses_copies():
    device = CpuDevice()
    device.close()
    buffer = make_buffer(1)
    with pytest.raises(IntegrityError):
        copy(device, READ, buffer, pages_of(0), buffer, pages_of(0))


def test_different_numbers_of_pages_are_refused(device):
    src, dst = make_buffer(3), make_buffer(3, value=-1)
    with pytest.raises(IntegrityError):
        copy(device, READ, src, pages_of(0, 1, 2), dst, pages_of(0, 1))


def test_an_event_tells_when_its_copy_began_and_ended(device):
    gate, buffer = Gate(), make_buffer(2)
    submitted = time.perf_counter()
    event = copy(device, READ, buffer, pages_of(0), buffer, pages_of(1), [gate])
    assert isinstance(event, CpuEvent)
    assert gate.waited_for.wait(timeout=60)
    assert (event.began, event.ended) == (0.0, 0.0)
    opened = time.perf_counter()
    gate.open()
    event.wait()
    assert submitted < opened < event.began < event.ended < time.perf_counter()
    busy = device.use(READ).busy_seconds
    assert busy == pytest.approx(event.ended - event.began)


def test_plain_memory_loses_no_pages(device):
    buffer = make_buffer(2)
    event = copy(device, READ, buffer, pages_of(0), buffer, pages_of(1))
    event.wait()
    assert device.failed_pages(event).tolist() == []
    assert device.failed_pages(device.compute_event()).tolist() == []
