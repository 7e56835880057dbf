# SPDX-License-Identifier: Apache-2.0
"""Tests specific to the CPU device: copy threads, their errors and their times."""

import os
import sys
import threading
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.fakes.gate import Gate
from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction, LinkUse
from vllm_tiered.devices.copy_thread import CpuEvent, copy_pages
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.errors import BudgetError

READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


# Copied bytes ----------------------------------------------------------------------------


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


def test_far_buffer_that_no_machine_has(device):
    with pytest.raises(BudgetError, match=r"4194304\.00 GiB .*lower kv\.far_gib"):
        device.far_buffer(2**40, 2**12)


# Order -----------------------------------------------------------------------------------


def test_wait_returns_the_time_that_compute_stood_still(device):
    gate, buffer = Gate(), make_buffer(1)
    event = copy(device, READ, buffer, pages_of(), buffer, pages_of(), [gate])
    assert gate.waited_for.wait(timeout=60)
    opener = threading.Timer(0.3, gate.open)
    opener.start()
    assert device.wait(event) > 0.0
    opener.join()
    assert device.wait(event) == 0.0


def test_compute_is_over_when_it_returns(device):
    event = device.compute_event()
    event.wait()
    assert event.done() and device.wait(event) == 0.0


# Threads and errors ----------------------------------------------------------------------


def test_copying_threads_run_on_the_given_cpus():
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


def test_an_error_reaches_all_users_of_the_event(device):
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
    """A caller that waits only for the last of many copies must get the error of an earlier one."""
    gate, buffer = Gate(), make_buffer(2)
    gate.fail(OSError("link down"))
    copy(device, WRITE, buffer, pages_of(0), buffer, pages_of(1), [gate])
    last = copy(device, WRITE, buffer, pages_of(0), buffer, pages_of(1))
    with pytest.raises(OSError, match="link down"):
        last.wait()


@pytest.mark.parametrize("line", [0, 1])
def test_done_never_says_yes_to_a_copy_that_fails_meanwhile(line):
    """The copy fails just before a line of ``done`` runs."""
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


@pytest.mark.parametrize("line", range(4))
def test_no_wake_up_is_lost_when_a_copy_ends_as_a_wait_begins(line):
    """The copy ends just before a line of ``wait`` runs."""
    event = CpuEvent()
    lines_seen: list[int] = []

    def trace(frame, what, _):
        if frame.f_code is not CpuEvent.wait.__code__:
            return None
        if what == "line":
            if len(lines_seen) == line:
                copying = threading.Thread(target=event.finish)
                copying.start()
                copying.join()
            lines_seen.append(frame.f_lineno)
        return trace

    def wait():
        sys.settrace(trace)
        event.wait()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(timeout=20.0)
    assert not waiting.is_alive()
    assert len(lines_seen) > line


# Counts and close ------------------------------------------------------------------------


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


def test_waits_for_an_event_end_in_every_order_of_threads():
    """Waits begin before, during and after the event's end; a lost wake-up would hang."""
    events = [CpuEvent() for _ in range(3000)]
    let_go = [0, 0, 0]

    def wait_for_all(who):
        for event in events:
            event.wait()
            assert event.is_over
            let_go[who] += 1

    waiting = [threading.Thread(target=wait_for_all, args=(who,), daemon=True) for who in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in waiting:
            thread.start()
        for event in events:
            event.finish()
        for thread in waiting:
            thread.join(timeout=60)
    finally:
        sys.setswitchinterval(before)
    assert let_go == [3000, 3000, 3000]
