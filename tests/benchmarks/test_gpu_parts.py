# SPDX-License-Identifier: Apache-2.0
"""The parts that need a GPU: refused without one; their arithmetic and engines with fakes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as benchmarks_command
from benchmarks import registry
from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.shapes import PLANNED_SHAPES
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES
from benchmarks.suites.gpu import __main__ as command
from benchmarks.suites.gpu import ffn, kernels, kv, l2, link, load, weights
from benchmarks.suites.gpu.parts import PARTS
from benchmarks.suites.kv.summary import BASELINE
from tests.fakes.benchmark_engines import FakeEngines, answer_in
from tests.fixtures.rounds import make_round
from vllm_tiered.kernels import tuned
from vllm_tiered.planner.model_shape import model_shape

LAUNCHERS = list(Path(tuned.__file__).parent.glob("*/api.py"))

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@without_gpu
@pytest.mark.parametrize("name", ["link", "kernels", "l2", "kv", "weights"])
def test_each_part_is_refused_without_a_gpu(name, capsys):
    assert benchmarks_command.main(["run", f"gpu_{name}"]) == 1
    printed = capsys.readouterr()
    assert f"error: gpu_{name} needs a GPU" in printed.err
    assert "RESULT" not in printed.out


@without_gpu
def test_the_command_is_refused_without_a_gpu_and_lists_its_parts(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "out")]) == 1
    assert "needs a GPU" in capsys.readouterr().err
    assert command.main(["links", "--out", str(tmp_path / "out")]) == 1
    assert "no part 'links'; there are: link, kernels" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_is_reported_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    asked = []
    run = subprocess.run

    def noted(arguments, **options):
        asked.append(arguments[3:])
        code = "raise SystemExit('broken link')" if "gpu_link" in arguments else "pass"
        return run([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "run", noted)
    (tmp_path / "gpu_link.json").write_text("of a former run")
    arguments = ["link", "l2", "--out", str(tmp_path), "--without-gpu", "--set", "l2.rows=1"]
    assert command.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "gpu_link: failed" in printed and "broken link" in printed and "gpu_l2: done" in printed
    assert asked[0][:2] == ["run", "gpu_link"] and "--set" not in asked[0]
    assert asked[1][-2:] == ["--set", "rows=1"]
    assert not (tmp_path / "gpu_link.json").exists()


def test_every_part_is_in_the_registry():
    assert {name for name in registry.BENCHMARKS if name.startswith("gpu_")} == {
        f"gpu_{name}" for name in PARTS
    }


PEAK = {"far_to_near": 50.0, "near_to_far": 40.0, "both": 80.0}


def rates(share):
    return {direction: share * peak for direction, peak in PEAK.items()}


BY_PAGE = {
    "4096": {"dma": rates(0.1), "kernel": {"8x2048": rates(0.3), "32x2048": rates(0.4)}},
    "65536": {"dma": rates(0.5), "kernel": {"8x2048": rates(0.88), "32x2048": rates(0.9)}},
    "1048576": {"dma": rates(0.95), "kernel": {"8x2048": rates(0.84), "32x2048": rates(0.86)}},
}


def test_the_fewest_programs_that_are_nearly_as_good_are_taken():
    found = link.summarise(PEAK, BY_PAGE, num_warps=4)
    assert found["tuned"] == {
        "block_words": 2048,
        "num_programs": 8,
        "num_warps": 4,
        "engine_run_bytes": 1 << 20,
    }
    assert found["target_share"] == pytest.approx(0.88), "of the better way, at the worst size"
    assert found["target_is_met"]
    few_are_slow = {"8x2048": rates(0.7), "32x2048": rates(0.8)}
    slower = {**BY_PAGE, "65536": {**BY_PAGE["65536"], "kernel": few_are_slow}}
    found = link.summarise(PEAK, slower, num_warps=4)
    assert found["tuned"]["num_programs"] == 32 and not found["target_is_met"]
    assert len(link.table(found).splitlines()) == 2 + len(slower) + 1
    with pytest.raises(MeasurementError, match="no pages of 65536 bytes or more"):
        link.summarise(PEAK, {"4096": BY_PAGE["4096"]}, 4)


def test_launch_parameters_become_a_file_named_after_the_device(tmp_path):
    assert command.tuned(tmp_path) is None
    found = link.summarise(PEAK, BY_PAGE, num_warps=4)
    result = {"device": {"name": "NVIDIA H200"}, **found}
    (tmp_path / "gpu_link.json").write_text(json.dumps(result))
    written = command.tuned(tmp_path)
    assert written is not None and written.name == "NVIDIA_H200.json"
    assert json.loads(written.read_text()).keys() == tuned.parameters("kv_pages").keys()


class FakeClock:
    def seconds(self, run, before=None):
        run()
        return run.seconds

    def flush(self) -> None:
        pass


def timed(seconds):
    def run():
        return None

    timed_run: Any = run
    timed_run.seconds = seconds
    return timed_run


CLOCK: Any = FakeClock()


def test_a_kernels_share_of_the_bandwidth():
    case = kernels.Case(
        name="c",
        num_bytes=10**9,
        run=timed(0.5),
        torch_runs={"dense": timed(1.0), "slow": timed(2.0)},
        target_share=0.7,
    )
    found = kernels.measure(case, CLOCK, 2.5e9)
    assert found["gb_per_s"] == pytest.approx(2)
    assert found["torch_us"] == {"dense": pytest.approx(1e6), "slow": pytest.approx(2e6)}
    assert found["share_of_bandwidth"] == pytest.approx(0.8) and found["target_is_met"]
    assert not kernels.measure(case, CLOCK, 4e9)["target_is_met"]
    with pytest.raises(MeasurementError, match="another result than its reference"):
        kernels.measure(replace(case, is_right=lambda: False), CLOCK, 4e9)
    assert len(kernels.table({"by_kernel": {"k": [found]}}).splitlines()) == 3


def test_a_kernel_meets_its_target_where_it_is_furthest_from_it():
    def case(name, share, target=0.7):
        return {
            "case": name,
            "share_of_bandwidth": share,
            "target_share": target,
            "target_is_met": target is not None and share >= target,
        }

    by_kernel = {
        "a": [case("x", 0.8), case("y", 0.75), case("z", 0.1, None)],
        "b": [case("u", 0.9), case("v", 0.45), case("w", 0.44, 0.5)],
        "c": [case("t", 0.3, None)],
    }
    assert kernels.targets(by_kernel) == {
        "a": {"target": 0.7, "found": 0.75, "is_met": True, "case": "y"},
        "b": {"target": 0.7, "found": 0.45, "is_met": False, "case": "v"},
    }


def test_every_kernel_is_measured():
    assert kernels.KERNELS.keys() == {path.parent.name for path in LAUNCHERS}
    for name, module in kernels.KERNELS.items():
        assert callable(__import__(module, fromlist=["cases"]).cases), name


def test_the_share_of_the_possible_gain():
    times = {"cold": (50e-6, 30e-6), "warm": (40e-6, 20e-6), "hot": (45e-6, 10e-6)}
    case = l2.summarise_case(times)
    assert case["speedup"] == pytest.approx(1.25) and case["matmul_speedup"] == pytest.approx(1.5)
    assert case["share_of_possible"] == pytest.approx(0.5)
    result = l2.summarise({"8 MiB, latency, 10 us": case})
    assert result["best_speedup"] == case["speedup"] and result["emulated"]
    assert len(l2.table(result).splitlines()) == 3


def test_requests_have_sharegpt_lengths_and_are_the_same_each_time():
    lengths = load.sharegpt_lengths(512)
    assert all(prompt > 0 and output > 0 for prompt, output in lengths)
    first = load.requests(9, 50, 60, 1000, 0)
    assert first == load.requests(9, 50, 60, 1000, 0) != load.requests(9, 50, 60, 1000, 1)
    for request, (prompt, output) in zip(first, lengths, strict=False):
        assert len(request.prompt_token_ids) == min(50, prompt)
        assert request.num_output_tokens == min(60, output)
    with pytest.raises(ValueError, match="513 requests, but there are 512 lengths"):
        load.sharegpt_lengths(513)


def test_engines_side_by_side_share_the_gpu():
    arguments = load.engine_args("cuda", 26 << 30, 140 << 30, eager=False)
    assert arguments["gpu_memory_utilization"] == pytest.approx(32 / 140)
    assert arguments["attention_backend"] == "TRITON_ATTN" and not arguments["enforce_eager"]
    assert load.engine_args("cpu", 1, 1, eager=False) == {}


KV = kv.Settings(
    shapes=("opt-tiny",),
    kv_gib=(0.003, 0.0),
    num_requests=6,
    max_prompt_tokens=64,
    max_output_tokens=64,
    control_requests=3,
    control_kv_share=0.9,
    device="cpu",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_TIERED_CACHE", str(tmp_path))


def test_kv_compares_in_the_same_memory_and_states_the_targets(monkeypatch, cache):
    def seconds_of(spec):
        if spec.tiered is None:
            return 4.0 if spec.label == BASELINE else 2.0
        return 2.5

    fakes = FakeEngines(answer_in(seconds_of))
    monkeypatch.setattr(kv, "engines", fakes)
    steps: list[str] = []
    result = kv.run(KV, steps.append)
    assert set(kv.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv.num_steps(KV)
    budget = result["by_shape"]["opt-tiny"]["by_budget"]["0.003 GiB"]
    assert budget["throughput_ratio"] == pytest.approx(1.6)
    found = {"target": 1.5, "found": pytest.approx(1.6), "is_met": True}
    assert result["targets"]["constrained_ratio"] == found
    assert result["targets"]["ratio_where_all_fits"]["is_met"]
    json.loads(json.dumps(result, allow_nan=False))
    assert len(kv.table(result).splitlines()) == 2 + len(KV.kv_gib)
    by_budget = [spec for spec in fakes.specs if spec.label in (BASELINE, "plugin auto")]
    for vllm, plugin in zip(by_budget[::2], by_budget[1::2], strict=True):
        assert replace(plugin, label="", tiered=None) == replace(vllm, label="")
        assert plugin.tiered == {"kv": {"expansion": "auto"}}


def budgets(ratio, stall, of_demand):
    auto = {"throughput_ratio": ratio, "stall_fraction": stall}
    return {"of_demand": of_demand, "plugin": {"auto": auto}}


def test_targets_are_of_the_worst_shape():
    by_shape = {
        "a": {"by_budget": {"3 GiB": budgets(1.7, 0.01, 0.2), "all": budgets(0.99, 0.5, 1.0)}},
        "b": {"by_budget": {"3 GiB": budgets(1.4, 0.03, 0.3), "7 GiB": budgets(1.45, 0.0, 0.7)}},
    }
    found = kv.targets_met(by_shape)
    assert found["constrained_ratio"] == {"target": 1.5, "found": 1.45, "is_met": False}
    assert found["stall_fraction"] == {"target": 0.02, "found": 0.03, "is_met": False}
    assert found["ratio_where_all_fits"] == {"target": 0.98, "found": 0.99, "is_met": True}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75, 0.99])
def test_the_prefetcher_gets_as_much_near_memory_as_it_can_use(share):
    shape = load.shape_of("opt-13b")
    layer_bytes = shape.layer_bytes // 40
    near_bytes = int(share * shape.layer_bytes)
    groups = weights.best_groups(shape, near_bytes)
    used = groups.near_bytes(40, layer_bytes)
    assert near_bytes - 2 * layer_bytes < used <= near_bytes
    with pytest.raises(ValueError, match="do not hold a layer"):
        weights.best_groups(shape, layer_bytes // 2)


def test_near_bytes_of_groups():
    # Of 8 layers in groups of 4 the last one of each is far: 6 stay, 1 buffer.
    assert weights.Groups(size=4, num_offloaded=1, ahead=1).near_bytes(8, 10) == 70
    assert weights.Groups(size=3, num_offloaded=3, ahead=1).near_bytes(8, 10) == 10


def without_kv_counters(seconds):
    """Return a round as engines with `kv.enabled` false give it."""
    return lambda spec, requests: make_round(spec.label, seconds=seconds[spec.label])


def test_weights_are_compared_with_the_better_of_vllms_offloaders(monkeypatch, cache):
    seconds = {weights.UVA: 8.0, weights.PREFETCH: 6.0, weights.OURS: 4.0, weights.NEAR: 2.0}
    fakes = FakeEngines(without_kv_counters(seconds))
    monkeypatch.setattr(weights, "engines", fakes)
    steps: list[str] = []
    settings = weights.Settings(shape="opt", device="cpu")
    result = weights.run(settings, steps.append)
    assert set(weights.RESULT_KEYS) <= result.keys() and len(steps) == weights.num_steps(settings)
    assert result["target"] == {"target": 1.3, "found": 1.5, "is_met": True}
    assert result["by_share"]["0.5"]["systems"][weights.OURS]["of_all_near"] == pytest.approx(0.5)
    json.loads(json.dumps(result, allow_nan=False))
    assert len(weights.table(result).splitlines()) == 2 + 4
    _, uva, prefetch, ours = fakes.specs
    shape = load.shape_of("opt")
    assert uva.engine_args == {"cpu_offload_gb": pytest.approx(shape.layer_bytes / 2 / 2**30)}
    assert prefetch.engine_args["offload_backend"] == "prefetch"
    assert ours.tiered["weights"]["near_gib"] == pytest.approx(shape.layer_bytes / 2 / 2**30)


def test_the_sparse_ffn_and_streamed_layers_have_the_same_near_bytes(monkeypatch, tmp_path):
    config = {
        **PLANNED_SHAPES["opt-tiny"],
        "ffn_dim": SYNTHETIC_SHAPES["opt-tiny"].sizes.ffn_dim,
        "hidden_size": SYNTHETIC_SHAPES["opt-tiny"].sizes.hidden_size,
        "num_hidden_layers": SYNTHETIC_SHAPES["opt-tiny"].sizes.num_layers,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(ffn, "synthetic_model_dir", lambda shape, folder, **options: tmp_path)
    monkeypatch.setattr(ffn, "synthetic_store", lambda *arguments, **options: tmp_path / "store")
    seconds = {ffn.SPARSE: 2.0, ffn.STREAMED: 3.0, ffn.DENSE: 1.0}
    fakes = FakeEngines(without_kv_counters(seconds))
    monkeypatch.setattr(ffn, "engines", fakes)
    steps: list[str] = []
    settings = ffn.Settings(shape="opt-tiny", device="cpu", folder=str(tmp_path))
    result = ffn.run(settings, steps.append)
    assert set(ffn.RESULT_KEYS) <= result.keys() and len(steps) == ffn.num_steps(settings)
    assert result["ratio_to_streaming"] == pytest.approx(1.5)
    assert len(ffn.table(result).splitlines()) == 2 + 3
    sparse, streamed, _ = (spec.tiered for spec in fakes.specs)
    layers = model_shape(config).layer_bytes
    ffn_bytes = 4 * 1024 * 256 * 4
    rest_gib = (layers - ffn_bytes) / 2**30
    assert streamed["weights"]["near_gib"] == pytest.approx(rest_gib + sparse["ffn"]["near_gib"])
    assert sparse["ffn"]["near_gib"] == pytest.approx(0.4 * ffn_bytes / 2**30)
