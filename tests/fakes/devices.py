# SPDX-License-Identifier: Apache-2.0
"""Fake device with delayed and lossy copies, for runs of the real engine."""

import random
import threading
import time

import numpy as np

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyJob, CopyThread
from vllm_tiered.devices.cpu import CpuDevice

NAN_BYTE = 0xFF  # a float or bfloat16 whose bytes are all 0xFF is a NaN


class DelayedThread(CopyThread):
    """Copy thread that delays copies at random and poisons the targets of reads first.

    Copies of one direction stay in order, as the contract says. Any order that the contract allows
    occurs between directions, and between copies and compute.
    """

    random = random.Random(0)
    max_delay_seconds = 0.0
    lost_share = 0.0
    lock = threading.Lock()

    def begin(self, job: CopyJob) -> None:
        job.copy.dst.data[job.copy.dst_pages.ids] = NAN_BYTE
        super().begin(job)

    def run(self, job: CopyJob) -> None:
        for event in job.after:
            event.wait()
        is_read = self.name.endswith(Direction.READ.value)
        if is_read and job.copy.src.store is None:
            job.copy.dst.data[job.copy.dst_pages.ids] = NAN_BYTE
        self.delay()
        super().run(job)
        if is_read and self.lost_share:
            self.lose(job)
        self.delay()

    def delay(self) -> None:
        with self.lock:
            seconds = self.random.uniform(0, self.max_delay_seconds)
        if self.random.random() < 0.5:
            time.sleep(seconds)

    def lose(self, job: CopyJob) -> None:
        """Report some of the pages as lost, and poison their targets again."""
        ids = job.copy.src_pages.ids
        is_lost = np.array([self.random.random() < self.lost_share for _ in ids], dtype=np.bool_)
        job.copy.dst.data[job.copy.dst_pages.ids[is_lost]] = NAN_BYTE
        job.done.failed_pages = np.union1d(job.done.failed_pages, ids[is_lost])


class DelayedDevice(CpuDevice):
    """:class:`CpuDevice` with random copy times and poisoned read targets.

    Args:
        seed: seed of the delays; tests that use the device print it.
        max_delay_seconds: upper limit of each of a copy's two delays.
        lost_share: share of the pages read that are lost (``failed_pages``).
    """

    def __init__(self, seed: int, max_delay_seconds: float, lost_share: float = 0.0) -> None:
        self.thread_class = type(
            "SeededThread",
            (DelayedThread,),
            {
                "random": random.Random(seed),
                "max_delay_seconds": max_delay_seconds,
                "lost_share": lost_share,
            },
        )
        super().__init__()
