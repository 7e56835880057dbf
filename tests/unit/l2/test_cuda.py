# SPDX-License-Identifier: Apache-2.0
"""Fork, launch and join on fakes of CUDA's streams: what is launched where, after what."""

from contextlib import contextmanager

import pytest
import torch

from vllm_tiered.l2.cuda import CudaRuntime, Kernels, StepKv

KV = StepKv(
    cache_PX=torch.empty(8, 100, dtype=torch.int8),
    block_table_BM=torch.zeros(2, 4, dtype=torch.int32),
    seq_lens_B=torch.ones(2, dtype=torch.int32),
    block_tokens=16,
)
WEIGHTS = [torch.empty(10), torch.empty(3)]


class Cuda:
    """Streams by name, and everything that happens on them in order."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.current = "main"
        self.is_capturing = False

    class Stream:
        def __init__(self, cuda, name) -> None:
            self.cuda, self.name = cuda, name

        def wait_stream(self, other) -> None:
            self.cuda.events.append((self.name, "waits for", other.name))

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def launched(self, *what) -> None:
        self.events.append((self.current, *what))

    def take(self):
        events, self.events = self.events, []
        return events


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    for name, replacement in (
        ("Stream", lambda: Cuda.Stream(fake, "side")),
        ("current_stream", lambda: Cuda.Stream(fake, fake.current)),
        ("stream", fake.on),
        ("is_current_stream_capturing", lambda: fake.is_capturing),
        ("synchronize", lambda: fake.launched("synchronized")),
    ):
        monkeypatch.setattr(torch.cuda, name, replacement)
    return fake


@pytest.fixture
def switch():
    return torch.zeros(1, dtype=torch.int32)


@pytest.fixture
def runtime(cuda, switch):
    kernels = Kernels(
        prefetch=lambda weight, _: cuda.launched("weight", weight.nbytes),
        prefetch_kv=lambda kv, _, max_bytes: cuda.launched("kv", max_bytes),
    )
    return CudaRuntime(kernels, lambda attention: KV if attention < 2 else None, switch)


def step(runtime):
    runtime.prefetch(WEIGHTS)
    runtime.prefetch_kv(0, 1000)
    runtime.join()


FORK = ("side", "waits for", "main")
JOIN = ("main", "waits for", "side")
LAUNCHES = [("side", "weight", 40), ("side", "weight", 12), ("side", "kv", 1000)]


def test_one_fork_and_one_join_around_all_that_an_all_reduce_hides(runtime, cuda):
    runtime.is_on = True
    step(runtime)
    assert cuda.take() == [FORK, *LAUNCHES, JOIN]
    runtime.join()
    assert cuda.take() == [], "nothing was forked since"


def test_off_launches_nothing_but_counts_the_bytes_of_a_step(runtime, cuda):
    step(runtime)
    step(runtime)
    assert cuda.take() == []
    assert (runtime.num_weights, runtime.weight_bytes, runtime.num_attentions) == (2, 52, 1)
    assert runtime.counts() == (0, 0)


def test_a_graph_captures_the_launches_and_asks_the_switch_at_each_replay(runtime, cuda, switch):
    cuda.is_capturing = True
    step(runtime)
    assert cuda.take() == [FORK, *LAUNCHES, JOIN]
    assert switch.item() == 0
    runtime.is_on = True
    assert switch.item() == 1
    runtime.close()
    assert switch.item() == 0


def test_kv_of_which_no_page_fits_is_skipped_and_a_dummy_step_has_none(runtime, cuda):
    runtime.is_on = True
    runtime.prefetch_kv(0, 99)
    runtime.prefetch_kv(2, 1000)
    runtime.join()
    assert cuda.take() == []


def test_prefetched_bytes_are_counted(runtime):
    runtime.is_on = True
    step(runtime)
    step(runtime)
    assert runtime.counts() == (104, 0)


def test_synchronize_waits_for_the_device(runtime, cuda):
    runtime.synchronize()
    assert cuda.take() == [("main", "synchronized")]
