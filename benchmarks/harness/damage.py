# SPDX-License-Identifier: Apache-2.0
"""Damages KV pages in far memory or storage at random, in an engine process that asks for it."""

from __future__ import annotations

import os
import random

import numpy as np

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyJob, CopyThread
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.storage.checksums import CheckedPages
from vllm_tiered.storage.page_file import PageFile

_pages_damaged = 0


def num_damaged() -> int:
    """Return how many pages were damaged in this process."""
    return _pages_damaged


def install(share: float, seed: int) -> None:
    """Flip one bit of a page before the first read from a far tier and this share of the others.

    To be called once.
    """
    rng = random.Random(seed)

    class DamagingThread(CopyThread):
        def run(self, job: CopyJob) -> None:
            global _pages_damaged
            copy = job.copy
            is_read = self.name.endswith(Direction.READ.value)
            is_due = not _pages_damaged or rng.random() < share
            # Pages without a store are read as the start measures a link: nobody verifies them.
            if is_read and copy.src.store is not None and len(copy.src_pages) and is_due:
                for event in job.after:  # a write to the page may be among them
                    if not event.done():
                        event.wait()
                page = rng.choice(copy.src_pages.ids.tolist())
                flip_bit(copy.src, page, rng.randrange(8 * copy.src.page_bytes))
                _pages_damaged += 1
            super().run(job)

    CpuDevice.thread_class = DamagingThread


def flip_bit(buffer: PageBuffer, page: int, bit: int) -> None:
    """Flip a bit of a page where it lies, in memory or in a file."""
    offset, mask = bit // 8, 1 << bit % 8
    store = buffer.store
    if not isinstance(store, CheckedPages | PageFile):
        buffer.data[page, offset] ^= mask
        return
    slot = int(store.slots.slots_of(np.array([buffer.first_page + page]))[0])
    if isinstance(store, CheckedPages):
        store._words.view(np.uint8)[slot, offset] ^= mask
        return
    with store._file as fd:
        # Not through the same descriptor, which takes whole blocks only. Direct reads see it.
        plain = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        position = slot * store.slot_bytes + offset
        (old,) = os.pread(plain, 1, position)
        os.pwrite(plain, bytes([old ^ mask]), position)
        os.fsync(plain)
    finally:
        os.close(plain)
