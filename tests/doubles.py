# SPDX-License-Identifier: Apache-2.0
"""Test doubles of the device, for runs of the real engine."""

import random
import threading
import time

from vllm_tiered.tiers.base import Direction
from vllm_tiered.tiers.cpu import CopyJob, CopyThread, CpuDevice

NAN_BYTE = 0xFF  # a float or bfloat16 whose bytes are all 0xFF is a NaN


class DelayedThread(CopyThread):
    """Starts and ends copies late, by random times; poisons the targets of reads first.

    Copies of one direction stay in order, as the contract says; against the other direction
    and against compute everything that the contract allows happens.
    """

    random = random.Random(0)
    max_delay_seconds = 0.0
    lock = threading.Lock()

    def run(self, job: CopyJob) -> None:
        for event in job.after:
            event.wait()
        if self.name.endswith(Direction.READ.value):
            job.dst.data[job.dst_pages.ids] = NAN_BYTE
        self.delay()
        super().run(job)
        self.delay()

    def delay(self) -> None:
        with self.lock:
            seconds = self.random.uniform(0, self.max_delay_seconds)
        if self.random.random() < 0.5:
            time.sleep(seconds)


class DelayedDevice(CpuDevice):
    """A :class:`CpuDevice` whose copies take random times and whose staging is poisoned.

    Args:
        seed: of the delays; printed by the tests that use it.
        max_delay_seconds: each copy is held up twice by at most this.
    """

    def __init__(self, seed: int, max_delay_seconds: float) -> None:
        self.thread_class = type(
            "SeededThread",
            (DelayedThread,),
            {"random": random.Random(seed), "max_delay_seconds": max_delay_seconds},
        )
        super().__init__()
