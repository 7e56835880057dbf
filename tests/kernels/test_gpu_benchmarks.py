# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmarks that need no engine, on doubles of CUDA: that they run, not what they find.

Tensors for the GPU are made on the CPU, streams and events do nothing, kernels are interpreted.
"""

import json
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu import device as gpu_device
from benchmarks.gpu import kernel_kv_pages, kernels, l2, link
from benchmarks.runner import MeasurementError
from vllm_tiered.kernels.kv_pages import kernel as kv_pages_kernel
from vllm_tiered.kernels.l2_prefetch import api as l2_api

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


class OnCpu(TorchFunctionMode):
    """What is asked of a GPU is done on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given: dict[str, Any] = dict(kwargs or {})
        given.pop("pin_memory", None)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        args = tuple("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args)
        return func(*args, **given)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    at: float

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end) -> float:
        return float(1e3 * max(1e-9, end.at - self.at))


class Stream:
    def wait_stream(self, other) -> None:
        assert isinstance(other, Stream)


@contextmanager
def on_stream(stream):
    yield


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    properties = SimpleNamespace(
        name="Double", major=9, minor=0, multi_processor_count=1, total_memory=1, L2_cache_size=4096
    )
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "stream": on_stream,
        "current_stream": Stream,
        "synchronize": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda index: properties,
        "get_device_name": lambda: "Double",
        "get_device_capability": lambda: (9, 0),
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_device, "_WARM_RUNS", 0)
    with OnCpu():
        yield


LINK = link.Settings(
    page_kib=(4, 64), programs=(1, 3), block_words=(8192,), pool_mib=1, max_pages=3, repeats=1
)


def checked(module, settings):
    steps: list[str] = []
    result = module.run(settings, steps.append)
    assert set(module.RESULT_KEYS) <= result.keys()
    assert len(steps) == module.num_steps(settings)
    json.loads(json.dumps(result, allow_nan=False))
    assert module.table(result).count("\n") > 1
    return result


def test_the_link_is_measured_by_page_and_way(device):
    result = checked(link, LINK)
    assert result["by_page"].keys() == {"4096", "65536"}
    assert result["by_page"]["4096"]["num_pages"] == 3
    assert result["by_page"]["65536"]["kernel"].keys() == {"1x8192", "3x8192"}


def test_a_page_that_arrives_damaged_is_not_measured(device, monkeypatch):
    class Launches:
        def __getitem__(self, grid):
            return lambda source, sources, target, targets, *arguments, **options: target[0].zero_()

    monkeypatch.setattr(kv_pages_kernel, "copy_pages_kernel", Launches())
    with pytest.raises(MeasurementError, match="pages of 4096 bytes differ, far_to_near"):
        link.run(LINK, lambda text: None)


def test_kernels_are_compared_with_torch_before_they_are_timed(device, monkeypatch):
    monkeypatch.setattr(kernel_kv_pages, "_POOL_BYTES", 4 << 20)
    monkeypatch.setattr(kernel_kv_pages, "_COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "copy_peak", lambda torch, clock: 1e9)
    asked = []
    for name in ("prefetch", "prefetch_kv"):
        monkeypatch.setattr(l2_api, name, lambda *arguments, **options: asked.append(options))
    result = checked(kernels, kernels.Settings(repeats=1))
    assert len(result["by_kernel"]["kv_pages"]) == 4
    assert asked and asked[0]["architecture"] == 90


def test_a_copy_from_device_to_device_gives_the_bandwidth():
    clock = gpu_device.Clock(torch, 1)
    assert gpu_device.copy_peak(torch, clock, 1 << 16) > 0


def test_the_prefetch_is_asked_for_in_warm_cases_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(
        l2_api, "prefetch", lambda weight, switch, **options: asked.append(weight.nbytes)
    )
    settings = l2.Settings(
        weight_mib=(1,), wait_us=(1,), rows=1, hidden=64, message_mib=1, repeats=1
    )
    result = checked(l2, settings)
    assert result["by_case"].keys() == {"1 MiB, latency, 1 us", "1 MiB, bandwidth, 1 us"}
    assert asked == [1 << 20] * 8, "two stand-ins, of which one round in four is timed"
