# SPDX-License-Identifier: Apache-2.0
"""Both prefetchers, and the runtime on top of them."""

import os
import time

import numpy as np
import pytest
import torch

from vllm_tiered.l2 import native
from vllm_tiered.l2.prefetcher import NativePrefetcher, TouchingPrefetcher
from vllm_tiered.l2.runtime import L2Runtime

MEMORY = np.zeros(8 << 20, dtype=np.uint8)


def spans(*sizes, memory=MEMORY):
    rows = [(memory.ctypes.data, size) for size in sizes]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


@pytest.fixture(params=[NativePrefetcher, TouchingPrefetcher])
def prefetcher(request):
    if request.param is NativePrefetcher and native.load() is None:
        pytest.skip("the native library was not built")
    made = request.param()
    yield made
    made.close()


def wait_until_idle(prefetcher) -> None:
    end = time.perf_counter() + 20
    while not prefetcher.is_idle():
        assert time.perf_counter() < end, prefetcher.counts()
        time.sleep(0.001)


def test_everything_is_fetched(prefetcher) -> None:
    prefetcher.begin(spans(1, 64, 100_001, 1 << 20))
    prefetcher.begin(spans(4096))
    wait_until_idle(prefetcher)
    assert prefetcher.counts() == (1 + 64 + 100_001 + (1 << 20) + 4096, 0)


def test_cancelled_bytes_are_dropped(prefetcher) -> None:
    count = 4096  # half a second and more, as this thread may have to wait for a core to cancel
    total = count * MEMORY.nbytes
    prefetcher.begin(spans(*[MEMORY.nbytes] * count))
    prefetcher.cancel()
    wait_until_idle(prefetcher)
    fetched, dropped = prefetcher.counts()
    assert fetched + dropped == total, "each byte is one or the other"
    assert dropped > 0


def test_it_works_after_a_cancel(prefetcher) -> None:
    for _ in range(50):
        prefetcher.begin(spans(1 << 16))
        prefetcher.cancel()
    before = sum(prefetcher.counts())
    prefetcher.begin(spans(1 << 16))
    wait_until_idle(prefetcher)
    assert sum(prefetcher.counts()) >= before + (1 << 16)


def test_closing_ends_it_in_the_middle_and_twice_is_once(prefetcher) -> None:
    prefetcher.begin(spans(*[MEMORY.nbytes] * 64))
    prefetcher.close()
    prefetcher.close()


@pytest.fixture
def one_core():
    """This thread's only core until the test ends."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


def test_reading_is_faster_after_it(one_core) -> None:
    """The only proof that lines arrive: prefetched on this thread's own core, read at once.

    Which other cores it could be seen from depends on who shares a cache, and a virtual machine
    does not say. Lines are read in random order: of those in a row a processor fetches the next
    ones itself. The fastest of each count: what else runs between the two evicts lines, but
    brings none.
    """
    if native.load() is None:
        pytest.skip("the native library was not built")
    wanted = np.ones((256 << 10) // 8, dtype=np.int64)
    of_lines = np.random.default_rng(0).permutation(wanted.nbytes // 64) * 8
    read = np.empty_like(of_lines)
    evicting = np.ones((128 << 20) // 8, dtype=np.int64)
    made = NativePrefetcher([one_core])
    warm: list[float] = []
    cold: list[float] = []
    for _ in range(30):
        for times in (warm, cold):
            evicting.sum()
            if times is warm:
                made.begin(spans(wanted.nbytes, memory=wanted))
                wait_until_idle(made)
            else:
                time.sleep(0.002)
            start = time.perf_counter()
            wanted.take(of_lines, out=read, mode="clip")
            times.append(time.perf_counter() - start)
    made.close()
    assert min(warm) < 0.8 * min(cold)


class Recorder:
    def __init__(self) -> None:
        self.begun: list[list[list[int]]] = []
        self.cancelled = 0

    def begin(self, spans) -> None:
        self.begun.append(spans.tolist())

    def cancel(self) -> None:
        self.cancelled += 1

    def close(self) -> None: ...


def test_the_switch_is_read_at_each_call() -> None:
    weights = [torch.zeros(10), torch.zeros(5)]
    recorder = Recorder()
    runtime = L2Runtime(recorder, lambda attention: spans(64))  # type: ignore[arg-type]
    runtime.prefetch(weights)
    runtime.prefetch_kv(3, 100)
    runtime.join()
    assert (runtime.num_weights, runtime.weight_bytes, runtime.num_attentions) == (2, 60, 1)
    assert recorder.begun == [] and recorder.cancelled == 0
    runtime.is_counting, runtime.is_on = False, True
    runtime.prefetch(weights)
    runtime.prefetch_kv(3, 100)
    runtime.join()
    assert recorder.begun[0] == [[weight.data_ptr(), weight.nbytes] for weight in weights]
    assert recorder.begun[1] == spans(64).tolist()
    assert recorder.cancelled == 1
    runtime.is_on = False
    runtime.prefetch(weights)
    assert len(recorder.begun) == 2


def test_kv_that_does_not_fit_is_skipped() -> None:
    recorder = Recorder()
    runtime = L2Runtime(recorder, lambda attention: spans(64, 64))  # type: ignore[arg-type]
    runtime.is_on = True
    runtime.prefetch_kv(0, 127)
    assert recorder.begun == []
    runtime.prefetch_kv(0, 128)
    assert len(recorder.begun) == 1
