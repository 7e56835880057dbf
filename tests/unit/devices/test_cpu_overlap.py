# SPDX-License-Identifier: Apache-2.0
"""Tests that copies overlap with compute; they compare the order of times, not durations."""

import time

import numpy as np
import pytest
import torch

from tests.fixtures.page_buffers import contents, copy, make_buffer
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyThread
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import Pages


class TimedThread(CopyThread):
    """Copy thread that records when each copy began and ended."""

    spans: list[tuple[float, float]]

    def run(self, job):
        begin = time.perf_counter()
        super().run(job)
        self.spans.append((begin, time.perf_counter()))


@pytest.fixture
def timed():
    """Return a device and the list of its copies' (begin, end)."""
    spans: list[tuple[float, float]] = []

    class TimedDevice(CpuDevice):
        thread_class = type("Timed", (TimedThread,), {"spans": spans})

    device = TimedDevice()
    yield device, spans
    device.close()


def test_a_copy_ends_while_one_matmul_runs(timed):
    """Neither holds the GIL: the copy ends without a wait while one call computes."""
    device, spans = timed
    src, dst = make_buffer(512, 64 * 1024), make_buffer(512, 64 * 1024, value=-1)
    ids = Pages(np.random.default_rng(0).permutation(512))
    matrix = torch.rand(2500, 2500)
    for _ in range(5):  # other processes may have the cores for a while
        event = copy(device, Direction.READ, src, ids, dst, Pages(np.arange(512)))
        begin = time.perf_counter()
        matrix @ matrix
        end = time.perf_counter()
        was_done = event.done()
        assert device.wait(event) >= 0.0
        if was_done and begin < spans[-1][1] < end:
            break
    assert was_done and begin < spans[-1][1] < end
    assert contents(dst) == ids.ids.tolist()


def test_python_runs_during_a_copy(timed):
    """``numpy.take`` releases the GIL; otherwise no line would run between begin and end."""
    device, spans = timed
    src, dst = make_buffer(2048, 64 * 1024), make_buffer(2048, 64 * 1024, value=-1)
    everything = Pages(np.arange(2048))
    assert len(everything.runs) == 1
    for _ in range(5):  # other processes may have the cores for a while
        event = copy(device, Direction.WRITE, src, everything, dst, everything)
        ticks = []
        while not event.done():
            ticks.append(time.perf_counter())
            time.sleep(1e-4)
        begin, end = spans[-1]
        num_between = sum(begin < tick < end for tick in ticks)
        if num_between >= 3:
            break
    assert num_between >= 3
