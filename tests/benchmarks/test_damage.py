# SPDX-License-Identifier: Apache-2.0
"""The soak's damages arrive where pages lie, and the plugin's checksums find them."""

import numpy as np
import pytest

from benchmarks.harness import damage
from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageError

PAGE_BYTES = 64


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(CpuDevice, "thread_class", CpuDevice.thread_class)
    monkeypatch.setattr(damage, "_pages_damaged", 0)
    damage.install(share=0.0, seed=0)
    device = CpuDevice()
    yield device
    device.close()


@pytest.mark.parametrize("tier", ["far", "storage"])
def test_the_first_read_is_of_a_damaged_page(device, tier, tmp_path):
    far = (
        device.far_buffer(8, PAGE_BYTES, verify="full")
        if tier == "far"
        else device.storage_buffer(tmp_path, 8, PAGE_BYTES)
    ).part(2, 6)
    near, pages = make_buffer(6), pages_of(0, 1, 2, 3, 4, 5)
    copy(device, Direction.WRITE, near, pages, far, pages).wait()
    arrived = make_buffer(6, value=-1)
    read = copy(device, Direction.READ, far, pages, arrived, pages)
    read.wait()
    assert damage.num_damaged() == 1
    (lost,) = device.failed_pages(read)
    assert contents(arrived) == [0 if page == lost else page for page in range(6)]
    assert device.page_errors()[PageError.CHECKSUM] == 1

    again = np.delete(pages.ids, lost)
    read = copy(device, Direction.READ, far, pages_of(*again), arrived, pages_of(*again))
    read.wait()
    assert not len(device.failed_pages(read)) and damage.num_damaged() == 1


def test_pages_that_nobody_verifies_are_left_alone(device):
    """The start reads some as it measures a link: the first damage is to be one that is found."""
    near, far, pages = make_buffer(2), device.far_buffer(2, PAGE_BYTES), pages_of(0, 1)
    copy(device, Direction.WRITE, near, pages, far, pages).wait()
    arrived = make_buffer(2, value=-1)
    copy(device, Direction.READ, far, pages, arrived, pages).wait()
    assert damage.num_damaged() == 0 and contents(arrived) == [0, 1]
