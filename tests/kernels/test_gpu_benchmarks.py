# SPDX-License-Identifier: Apache-2.0
"""Tests that the GPU benchmarks without an engine run on a fake of CUDA; results do not matter.

GPU tensors are on the CPU, streams and events do nothing, and kernels are interpreted.
"""

import json
import time
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.harness.runner import MeasurementError
from benchmarks.suites.gpu import device as gpu_device
from benchmarks.suites.gpu import (
    kernel_dequant_linear,
    kernel_expert_slots,
    kernel_kv_pages,
    kernel_neuron_cache,
    kernel_neuron_ffn,
    kernel_select_neurons,
    kernels,
    l2,
    link,
)
from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.kv_pages import kernel as kv_pages_kernel
from vllm_tiered.kernels.l2_prefetch import api as l2_api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
]


class OnCpu(TorchFunctionMode):
    """Mode that runs GPU operations on the CPU."""

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
        name="Fake", major=9, minor=0, multi_processor_count=1, total_memory=1, L2_cache_size=4096
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
        "get_device_name": lambda: "Fake",
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
    result = checked(kernels, kernels.Settings(kernels=("kv_pages", "l2_prefetch"), repeats=1))
    assert len(result["by_kernel"]["kv_pages"]) == 4
    assert not result["targets"]
    assert asked and asked[0]["architecture"] == 90


@pytest.fixture
def small(monkeypatch):
    """Use small shapes and a fixed bandwidth."""
    monkeypatch.setattr(kernels, "copy_peak", lambda torch, clock: 1e9)
    shapes = {"Llama-13B": (128, 40, True), "OPT-13B": (128, 50, False)}
    monkeypatch.setattr(kernel_neuron_ffn, "_SHAPES", shapes)
    monkeypatch.setattr(kernel_select_neurons, "_NEURONS", {"Llama-13B": 300, "OPT-13B": 512})
    monkeypatch.setattr(kernel_select_neurons, "_TOKENS", (1, 4))
    monkeypatch.setattr(kernel_neuron_cache, "_NEURONS", {"Llama-13B": 300})
    monkeypatch.setattr(kernel_expert_slots, "_LAYERS", {"OLMoE": (16, 4, 8, 4096)})
    matrices = {"up": (70, 128), "down": (128, 192)}
    monkeypatch.setattr(kernel_dequant_linear, "_MATRICES", matrices)
    # The interpreter's time is per call: few programs, each with much work.
    own = {"num_programs": 2, "tile_neurons": 64, "tile_bytes": 1 << 18, "batch_programs": 4}
    parameters = {
        **tuned.parameters("neuron_ffn"),
        **own,
        "reduce_block": 4096,
    }
    found = tuned.parameters

    def fewer(kernel, device_name=None):
        return parameters if kernel == "neuron_ffn" else found(kernel, device_name)

    monkeypatch.setattr(tuned, "parameters", fewer)


def test_the_ffn_is_measured_in_each_codec_and_for_each_number_of_tokens(device, small):
    result = checked(kernels, kernels.Settings(kernels=("neuron_ffn",), repeats=1))
    found = result["by_kernel"]["neuron_ffn"]
    assert len(found) == 2 * 3 * (4 + 1)
    assert sum(case["target_share"] == 0.7 for case in found) == 2 * 3 * 3
    target = result["targets"]["neuron_ffn"]
    assert target["found"] == min(
        case["share_of_bandwidth"] for case in found if case["target_share"]
    )
    by_name = {case["case"]: case for case in found}
    dense = by_name["Llama-13B bfloat16, 40 neurons, 4 tokens"]
    assert dense["num_bytes"] == 40 * 3 * 128 * 2 + 4 * 128 * (2 + 4)
    assert dense["torch_us"].keys() == {"dense in 16 bit"}
    int4 = by_name["OPT-13B int4, 50 neurons, 16 tokens"]
    assert int4["num_bytes"] == 50 * (128 + 2 * 2 * 2 + 4) + 16 * 128 * (2 + 4)
    assert int4["torch_us"].keys() == {"dense in 16 bit", "made 16-bit, dense"}


def test_selection_is_measured_with_and_without_a_threshold(device, small):
    result = checked(kernels, kernels.Settings(kernels=("select_neurons",), repeats=1))
    found = result["by_kernel"]["select_neurons"]
    assert [case["torch_us"].keys() for case in found] == [{"topk"}, set()] * 4
    assert not result["targets"]


def test_the_index_is_measured_against_the_hosts(device, small):
    result = checked(kernels, kernels.Settings(kernels=("neuron_cache",), repeats=1))
    found = result["by_kernel"]["neuron_cache"]
    assert [case["torch_us"].keys() for case in found] == [{"the host's"}] * 4
    assert not result["targets"]


def test_slots_are_measured_against_the_hosts_and_against_copies(device, small):
    result = checked(kernels, kernels.Settings(kernels=("expert_slots",), repeats=1))
    resolving, filling = result["by_kernel"]["expert_slots"]
    assert resolving["torch_us"].keys() == {"the host's"}
    assert filling["torch_us"].keys() == {"copies one by one"}
    assert filling["num_bytes"] == 2 * 4 * 4096 and not result["targets"]


def test_matmuls_with_4_bit_matrices_are_measured(device, small):
    result = checked(kernels, kernels.Settings(kernels=("dequant_linear",), repeats=1))
    found = result["by_kernel"]["dequant_linear"]
    assert len(found) == 2 * 4
    assert found[0]["num_bytes"] == 70 * (64 + 4 * 2 * 2) + 2 * (128 + 70)
    assert found[0]["torch_us"].keys() == {"in 16 bit", "made 16-bit"}


def one_neuron_less(run):
    return lambda x_BH, bundles, num_rows, *given, **options: run(
        x_BH, bundles, num_rows - 1, *given, **options
    )


def one_present_less(run):
    def changed(x_BH, bundles, missing, present_slot_ids, counts, *given, **options):
        counts = torch.stack([counts[0], counts[1] - 1])
        return run(x_BH, bundles, missing, present_slot_ids, counts, *given, **options)

    return changed


def nothing_loaded(run):
    def changed(x_BH, bundles, missing, *given, **options):
        before = bundles.slots[missing.slot_ids]
        found = run(x_BH, bundles, missing, *given, **options)
        bundles.slots[missing.slot_ids] = before
        return found

    return changed


def one_chosen_less(run):
    def changed(*given, **options):
        ids_3N, counts_3 = run(*given, **options)
        return ids_3N, counts_3 - 1

    return changed


def one_row_less(run):
    def changed(index, reached_N, **options):
        reached_N = reached_N.clone()
        reached_N[reached_N.argmax()] = 0
        return run(index, reached_N, **options)

    return changed


def one_expert_less(run):
    def changed(index, ids, **options):
        ids = ids.clone()
        ids[0, 0] = ids[0, 1]
        return run(index, ids, **options)

    return changed


def no_row(run):
    return lambda *given, **options: None


def one_feature_less(run):
    def changed(x_BK, *given, **options):
        x_BK = x_BK.clone()
        x_BK[:, -1] = 0
        return run(x_BK, *given, **options)

    return changed


@pytest.mark.parametrize(
    ("name", "launcher", "change"),
    [
        ("neuron_ffn", "compute_ffn", one_neuron_less),
        ("neuron_ffn", "load_and_compute", one_present_less),
        ("neuron_ffn", "load_and_compute", nothing_loaded),
        ("neuron_cache", "plan", one_row_less),
        ("expert_slots", "resolve", one_expert_less),
        ("expert_slots", "fill", no_row),
        ("select_neurons", "select", one_chosen_less),
        ("dequant_linear", "linear", one_feature_less),
    ],
)
def test_a_wrong_matmul_is_not_measured(name, launcher, change, device, small, monkeypatch):
    api = import_module(f"vllm_tiered.kernels.{name}.api")
    monkeypatch.setattr(api, launcher, change(getattr(api, launcher)))
    with pytest.raises(MeasurementError, match="another result than its reference"):
        kernels.run(kernels.Settings(kernels=(name,), repeats=1), lambda text: None)


def test_a_copy_from_device_to_device_gives_the_bandwidth():
    clock = gpu_device.Clock(torch, 1)
    assert gpu_device.copy_peak(torch, clock, 1 << 16) > 0


def test_only_warm_cases_prefetch(monkeypatch):
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
