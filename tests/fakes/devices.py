# SPDX-License-Identifier: Apache-2.0
"""Fake device with delayed and lossy copies, for runs of the real engine."""

import random
import threading
import time

import numpy as np

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CopyJob, CopyThread, CpuDevice

NAN_BYTE = 0xFF  # a float or bfloat16 whose bytes are all 0xFF is a NaN


class DelayedThread(CopyThread):
    """Starts and ends copies late, by random times; poisons the targets of reads first.

    Copies of one direction stay in order, as the contract says; against the other direction
    and against compute everything that the contract allows happens.
    """

    random = random.Random(0)
    max_delay_seconds = 0.0
    lost_share = 0.0
    lock = threading.Lock()

    def run(self, job: CopyJob) -> None:
        for event in job.after:
            event.wait()
        is_read = self.name.endswith(Direction.READ.value)
        if is_read:
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
        """Some of the pages did not arrive: their targets are poisoned again."""
        ids = job.copy.src_pages.ids
        is_lost = np.array([self.random.random() < self.lost_share for _ in ids], dtype=np.bool_)
        job.copy.dst.data[job.copy.dst_pages.ids[is_lost]] = NAN_BYTE
        job.done.failed_pages = np.union1d(job.done.failed_pages, ids[is_lost])


class DelayedDevice(CpuDevice):
    """A :class:`CpuDevice` whose copies take random times and whose staging is poisoned.

    Args:
        seed: of the delays; printed by the tests that use it.
        max_delay_seconds: each copy is held up twice by at most this.
        lost_share: share of the pages read that do not arrive (``failed_pages``).
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
