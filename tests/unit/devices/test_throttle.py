# SPDX-License-Identifier: Apache-2.0
"""Tests of the throttle; upper bounds on times are wide, as other processes use the cores too."""

import math
import threading
import time
from functools import partial

import numpy as np
import pytest

from tests.fixtures.page_buffers import copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import Pages
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.errors import ConfigError

READ, WRITE = Direction.READ, Direction.WRITE
SLACK_SECONDS = 2.0


def seconds_of(action):
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def transfer(throttle, num_bytes):
    throttle.hold(throttle.admit(num_bytes, time.perf_counter()))


@pytest.mark.parametrize(
    ("bytes_per_second", "latency", "wanted"),
    [(1e4, 0.0, 0.1), (1e4, 0.1, 0.2), (math.inf, 0.1, 0.1), (1e9, 0.0, 0.0)],
)
def test_a_transfer_takes_bandwidth_and_latency(bytes_per_second, latency, wanted):
    seconds = seconds_of(lambda: transfer(Throttle(bytes_per_second, latency), 1000))
    assert wanted <= seconds < wanted + SLACK_SECONDS


def test_real_work_counts():
    """The throttle sleeps only for the remaining time."""
    for seconds_of_work in (1.95, 5.0):
        throttle = Throttle(500)
        ticket = throttle.admit(1000, time.perf_counter() - seconds_of_work)
        assert seconds_of(partial(throttle.hold, ticket)) < 1.9


def test_idle_time_is_lost():
    throttle = Throttle(1e4)
    time.sleep(0.2)
    assert seconds_of(lambda: transfer(throttle, 1000)) >= 0.1
    time.sleep(0.2)
    assert seconds_of(lambda: transfer(throttle, 1000)) >= 0.1


@pytest.mark.parametrize("num_users", [2, 5])
def test_users_share_the_bandwidth(num_users):
    throttle = Throttle(1e4, 0.05)
    ends: list[float] = []

    def use():
        for _ in range(2):
            transfer(throttle, 500)
        ends.append(time.perf_counter())

    users = [threading.Thread(target=use) for _ in range(num_users)]
    begin = time.perf_counter()
    for user in users:
        user.start()
    for user in users:
        user.join()
    wanted = num_users * 2 * 500 / 1e4 + 0.05
    assert wanted <= max(ends) - begin < wanted + SLACK_SECONDS


def test_latencies_of_different_users_overlap():
    throttle = Throttle(math.inf, 0.2)
    users = [threading.Thread(target=transfer, args=(throttle, 1)) for _ in range(20)]

    def run():
        for user in users:
            user.start()
        for user in users:
            user.join()

    assert 0.2 <= seconds_of(run) < 20 * 0.2


@pytest.mark.parametrize("change", ["off", "set"])
def test_a_change_reaches_transfers_under_way(change):
    throttle = Throttle(1.0, 100.0)
    held = threading.Thread(target=transfer, args=(throttle, 10**6))
    held.start()
    time.sleep(0.05)
    assert held.is_alive()
    if change == "off":
        throttle.off()
    else:
        throttle.set(1e7)
    held.join(timeout=30)
    assert not held.is_alive()
    assert seconds_of(lambda: transfer(throttle, 1000)) < SLACK_SECONDS


def test_a_new_limit_applies_only_to_the_rest_of_a_transfer():
    """Half of the transfer runs at one bandwidth, half at another."""
    throttle = Throttle(1e4)
    begin = time.perf_counter()
    ticket = throttle.admit(4000, begin)
    time.sleep(0.2)
    changed = time.perf_counter()
    throttle.set(2e4)
    throttle.hold(ticket)
    first_half_bytes = min(4000, (changed - begin) * 1e4)
    assert time.perf_counter() - changed >= (4000 - first_half_bytes) / 2e4 - 1e-3
    throttle.set(1e3)
    assert seconds_of(lambda: transfer(throttle, 100)) >= 0.1


def test_each_transfer_is_paid_once():
    throttle = Throttle(1e5)

    def run():
        for _ in range(40):
            transfer(throttle, 500)

    assert 0.2 <= seconds_of(run) < 0.2 + SLACK_SECONDS


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan])
def test_a_bandwidth_that_is_none(bandwidth):
    with pytest.raises(ConfigError, match=r"give a bandwidth above 0"):
        Throttle(bandwidth)


@pytest.mark.parametrize("latency", [-1.0, math.inf, math.nan])
def test_a_latency_that_is_none(latency):
    throttle = Throttle(1e4)
    with pytest.raises(ConfigError, match=r"give a finite one, at least 0"):
        throttle.set(1.0, latency)
    assert seconds_of(lambda: transfer(throttle, 1000)) < SLACK_SECONDS, "something has changed"


# On the device ---------------------------------------------------------------------------


def test_a_throttled_direction_is_busy_for_that_long():
    device = CpuDevice(throttles={READ: Throttle(64 * 20 / 0.1)})
    src, dst = make_buffer(20), make_buffer(20, value=-1)
    pages = Pages(np.arange(20))
    seconds = seconds_of(lambda: copy(device, READ, src, pages, dst, pages).wait())
    assert seconds >= 0.1
    assert device.use(READ).busy_seconds >= 0.1
    assert seconds_of(lambda: copy(device, WRITE, src, pages, dst, pages).wait()) < SLACK_SECONDS
    assert device.use(WRITE).busy_seconds < 0.1
    device.close()


def test_both_directions_may_share_one_link():
    throttle = Throttle(64 * 20 / 0.1)
    device = CpuDevice(throttles=dict.fromkeys(Direction, throttle))
    src, pages = make_buffer(20), Pages(np.arange(20))
    dst = {direction: make_buffer(20) for direction in Direction}

    def run():
        events = [copy(device, d, src, pages, dst[d], pages) for d in Direction]
        for event in events:
            event.wait()

    assert seconds_of(run) >= 0.2
    device.close()


def test_storage_can_be_throttled(tmp_path):
    throttle = Throttle(1e6, 0.05)
    device = CpuDevice(throttles={READ: throttle})
    far = device.storage_buffer(tmp_path, 10, 4096)
    src, dst = make_buffer(10, 4096), make_buffer(10, 4096, value=-1)
    copy(device, WRITE, src, pages_of(1), far, pages_of(1)).wait()
    begin = time.perf_counter()
    event = copy(device, READ, far, pages_of(1), dst, pages_of(1))
    event.wait()
    assert time.perf_counter() - begin >= 0.054
    assert event.ended - event.began >= 0.054
    assert dst.words[1, 0] == 1
    device.close()
