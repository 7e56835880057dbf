# SPDX-License-Identifier: Apache-2.0
"""Tests that the fake device of engine tests loses and poisons pages as documented."""

import numpy as np
import pytest

from tests.fakes.devices import NAN_BYTE, DelayedDevice
from tests.fixtures.page_buffers import copy, make_buffer
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.pages import Pages

PAGES = Pages(np.arange(200), ascending=True)


@pytest.fixture
def lossy():
    device = DelayedDevice(3, 1e-3, lost_share=0.25)
    yield device
    device.close()


def test_lost_pages_are_named_and_poisoned(lossy):
    src, near = make_buffer(200), make_buffer(200, value=-1)
    far = lossy.far_buffer(200, 64)
    written = copy(lossy, Direction.WRITE, src, PAGES, far, PAGES)
    event = copy(lossy, Direction.READ, far, PAGES, near, PAGES, [written])
    event.wait()
    lost = lossy.failed_pages(event)
    assert 20 < len(lost) < 80
    assert (near.data[lost] == NAN_BYTE).all()
    good = np.setdiff1d(PAGES.ids, lost)
    assert near.words is not None
    assert (near.words[good] == good[:, None]).all()
