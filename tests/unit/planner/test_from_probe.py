# SPDX-License-Identifier: Apache-2.0
"""Machine from a probe's file: its figures, their provenance, and files that are refused."""

import dataclasses
import json

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from tests.fixtures.probes import sample_probe
from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.from_probe import (
    LAYER_CALLS,
    MAX_FILE_BYTES,
    STEP_CALLS,
    load_machine,
    machine_from_probe,
    read_probe_file,
)
from vllm_tiered.planner.host_compute import host_bytes_per_s
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.measured_curves import GemmCurve
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.pipeline_time import ComputeTimes, Slowdown, pipeline_step_time
from vllm_tiered.planner.step_time import (
    Batch,
    compute_times,
    far_link,
    predict_step,
    slowdown,
    storage_link,
)
from vllm_tiered.units import MIB
from vllm_tiered.weights.placement import place, spill_to_storage

LLAMA = model_shape(LLAMA_3_8B)
DECODE = Batch(requests=1, new_tokens=1, context_tokens=0)


def test_figures_are_what_was_measured():
    machine, figures = machine_from_probe(sample_probe())
    assert machine.read_gb_per_s == pytest.approx(5)
    assert machine.near_gb_per_s == pytest.approx(10)
    assert machine.tflops == pytest.approx(4e9 * 64 / 1e12)
    assert machine.step_overhead_ms == pytest.approx(STEP_CALLS * 2e-3)
    assert far_link(machine, 0).latency_s == pytest.approx(1000 / 5e9)
    assert slowdown(machine) == Slowdown(1.25, 1.5)
    assert {figure["kind"] for figure in figures.values()} == {"measured", "assumed"}
    assert figures["read_gb_per_s"]["kind"] == "measured"
    assert "abacus, 2026-11-22" in str(figures["read_gb_per_s"]["source"])
    assert figures["step_overhead_ms"]["kind"] == "assumed"
    assert f"{STEP_CALLS} times the 2.00 us" in str(figures["step_overhead_ms"]["source"])


def test_beside_a_gpu_are_its_hosts_reads_and_the_assumptions_of_gpus():
    probe = sample_probe()
    probe["machine"]["device"] = "cuda"
    probe["host_read"] = {"num_bytes": 10**9, "seconds": 0.02}
    machine, figures = machine_from_probe(probe)
    assert machine.host_gb_per_s == pytest.approx(50)
    assert figures["host_gb_per_s"]["kind"] == "measured"
    profile = load_machine("h200-pcie5")[0]
    assert machine.step_overhead_ms == profile.step_overhead_ms
    assert machine.request_overhead_us == pytest.approx(profile.request_overhead_us)
    assert figures["step_overhead_ms"]["kind"] == "assumed"
    assert machine.curves is not None
    assert machine.curves.layer_overhead_us < 100
    assert host_bytes_per_s(machine) == pytest.approx(45e9)  # without what the link takes


def test_what_a_small_engine_measured_is_not_assumed():
    costs = {
        "step_seconds": 3e-3,
        "request_seconds": 2e-4,
        "layer_seconds": 5e-4,
        "row_seconds_per_feature": 1e-9,
        "attention_request_seconds": 0.0,
        "decode_kv_bytes_per_s": 20e9,
        "decode_operations_per_s": 7e9,
        "prompt_operations_per_s": 14e9,
    }
    machine, figures = machine_from_probe({**sample_probe(), "step_costs": costs})
    assert {figure["kind"] for figure in figures.values()} == {"measured"}
    assert machine.step_overhead_ms == pytest.approx(3)
    assert machine.request_overhead_us == pytest.approx(200)
    assert machine.curves is not None and machine.curves.attention is not None
    assert machine.curves.layer_overhead_us == pytest.approx(500)
    attention = machine.curves.attention
    assert attention.request_us == 0.0 and attention.row_ns_per_feature == pytest.approx(1)
    assert attention.decode_kv_gb_per_s == pytest.approx(20)
    assert attention.decode_gflops == pytest.approx(7)
    assert attention.prompt_gflops == pytest.approx(14)
    without = machine_from_probe(sample_probe())[0].curves
    assert without is not None and without.attention is None


def test_reads_of_weights_say_what_storage_takes():
    reads = [{"num_bytes": size, "seconds": 3e-4 + size / 2e9} for size in (MIB, 64 * MIB)]
    slower = {"compute_slowdown": 1.2, "link_slowdown": 0.9}
    stored = {"storage": {"weight_reads": reads, "contention": slower}}
    machine, figures = machine_from_probe(sample_probe() | stored)
    assert machine.storage_read_gb_per_s == pytest.approx(2.0)
    assert machine.storage_latency_us == pytest.approx(300.0)
    link = storage_link(machine)
    assert link is not None and link.seconds(MIB) == pytest.approx(3e-4 + MIB / 2e9)
    assert "1.00 MiB to 64.00 MiB" in str(figures["storage_read_gb_per_s"]["source"])
    # Reads that seem faster beside compute are not.
    assert machine.curves is not None and machine.curves.storage_slowdown == (1.2, 1.0)
    machine, _ = machine_from_probe(sample_probe())
    assert storage_link(machine) is None
    assert machine.curves is not None and machine.curves.storage_slowdown is None


def test_a_step_is_slowed_by_what_it_reads():
    """By the copies' factors, by the reads', or by their means over the seconds of each."""
    reads = [{"num_bytes": size, "seconds": size / 5e9} for size in (MIB, 64 * MIB)]
    slower = {"compute_slowdown": 1.05, "link_slowdown": 1.1}
    stored = {"storage": {"weight_reads": reads, "contention": slower}}
    machine, _ = machine_from_probe(sample_probe() | stored)
    machine = dataclasses.replace(machine, far_layer_overhead_us=0.0)
    far = place("all_far", LLAMA.sublayers)
    on_disk = spill_to_storage(far, 0)
    half = spill_to_storage(far, far.far_bytes // 2)
    assert slowdown(machine, far) == slowdown(machine) == (1.25, 1.5)
    assert slowdown(machine, on_disk) == pytest.approx((1.05, 1.1))
    assert slowdown(machine, half, range(len(LLAMA.sublayers))) == pytest.approx((1.05, 1.1))
    assert slowdown(machine, half) == pytest.approx((1.15, 1.3), rel=0.02)
    profile = dataclasses.replace(load_profile("rtx4090-pcie4"), near_bytes_per_copied_byte=1.0)
    assert slowdown(profile, on_disk).compute < slowdown(profile, far).compute
    assert storage_link(profile) is not None


def test_the_faster_gemm_says_what_memory_carries():
    probe = sample_probe()
    for entry in probe["gemms"]["far"]:
        entry["seconds"] /= 4  # from half of the near ones' rate to twice it
    assert machine_from_probe(probe)[0].near_gb_per_s == pytest.approx(20)


def test_bytes_that_compute_loses_to_a_copy():
    """Compute reads 2 GB/s less (10 - 10/1.25) while copies move 5/1.5 GB/s: 0.6 bytes per byte."""
    machine, _ = machine_from_probe(sample_probe())
    assert machine.near_bytes_per_copied_byte == pytest.approx(0.6)


def test_a_file_is_a_machine_and_so_is_a_name(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(sample_probe()))
    assert load_machine(str(path)) == machine_from_probe(sample_probe())
    machine, figures = load_machine("gh200")
    assert machine.curves is None and machine.read_gb_per_s == 419
    assert figures["read_gb_per_s"]["kind"] == "published"


def broken(change):
    probe = sample_probe()
    change(probe)
    return json.dumps(probe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(None, "cannot be read: No such file", id="absent"),
        pytest.param("{", "is not valid JSON", id="cut"),
        pytest.param("[]", "is not a probe's result", id="list"),
        pytest.param('{"format": "x"}', "is not a probe's result", id="other"),
        pytest.param(
            broken(lambda p: p.update(version=4)), "version 4, and this reads 5", id="old"
        ),
        pytest.param(broken(lambda p: p.pop("links")), "damaged: no 'links'", id="key"),
        pytest.param(
            broken(lambda p: p["links"]["read"][0].update(seconds=-1)),
            "seconds is -1, and must be a number above 0",
            id="negative",
        ),
        pytest.param(
            broken(lambda p: p["contention"].update(link_slowdown="much")),
            "link_slowdown is 'much'",
            id="text",
        ),
        pytest.param(broken(lambda p: p["gemms"].update(far=[])), "no GEMMs", id="empty"),
        pytest.param(
            broken(lambda p: p.update(step_costs={"layer_seconds": -1})),
            "layer_seconds is -1",
            id="negative cost",
        ),
        pytest.param(broken(lambda p: p["links"].update(read=[])), "is damaged", id="no link"),
        pytest.param(broken(lambda p: p.update(links=None)), "is damaged", id="null"),
        pytest.param("[" * 10**5, "is not valid JSON: more than 64", id="nested"),
        pytest.param(" " * (MAX_FILE_BYTES + 1), "has 4.00 MiB, more than", id="long"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    path = tmp_path / "probe.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_probe_file(path)


# Curves ---------------------------------------------------------------------------------


def test_a_curve_gives_what_was_measured_and_lines_between():
    curve = GemmCurve.of({(1, 100): 1.0, (1, 300): 2.0, (5, 100): 3.0, (5, 300): 4.0})
    assert curve.seconds(100, 1) == 1.0
    assert curve.seconds(200, 1) == 1.5
    assert curve.seconds(50, 1) == 0.5
    assert curve.seconds(600, 1) == 4.0
    assert curve.seconds(100, 3) == 2.0
    assert curve.seconds(100, 10) == 6.0
    assert curve.seconds(0, 1) == 0.0


def test_near_sublayers_take_what_their_products_took():
    machine, _ = machine_from_probe(sample_probe())
    times = compute_times(LLAMA, machine, DECODE)
    ffn = LLAMA.sublayers[1]
    matrices = sum(p.num_bytes for p in ffn.parameters if "norm" not in p.name)
    assert times.compute[1] == pytest.approx(matrices / 10e9 + LAYER_CALLS * 2e-6 / 2)


def test_products_in_4_bit_are_taken_for_those_of_16_bit():
    """So it is without a measurement; by their bytes alone they would look like smaller ones."""
    machine, _ = machine_from_probe(sample_probe())
    small = model_shape(LLAMA_3_8B, compress="int4")
    prefill = Batch(requests=1, new_tokens=64, context_tokens=0)
    for batch in (DECODE, prefill):
        assert compute_times(small, machine, batch) == compute_times(LLAMA, machine, batch)


def test_products_in_4_bit_where_they_were_measured():
    """Measured times apply only to matrices in 4 bit, by the bytes that they have in 16 bit."""
    machine, _ = machine_from_probe(sample_probe())
    assert machine.curves is not None
    quick = GemmCurve.of({(1, 10**6): 1e-6, (1, 10**7): 1e-5})
    with_quick = dataclasses.replace(
        machine, curves=dataclasses.replace(machine.curves, compressed=quick)
    )
    assert compute_times(LLAMA, with_quick, DECODE) == compute_times(LLAMA, machine, DECODE)
    small = model_shape(LLAMA_3_8B, compress="int4")
    times = compute_times(small, with_quick, DECODE, place("all_far", small.sublayers))
    matrices = sum(p.num_bytes for p in LLAMA.sublayers[1].parameters if "norm" not in p.name)
    assert times.compute[1] == pytest.approx(matrices * 1e-12 + LAYER_CALLS * 2e-6 / 2)


def test_far_weights_take_the_other_product():
    machine, _ = machine_from_probe(sample_probe())
    near = compute_times(LLAMA, machine, DECODE)
    far = compute_times(LLAMA, machine, DECODE, place("all_far", LLAMA.sublayers))
    overhead = LAYER_CALLS * 2e-6 / 2
    assert far.compute[1] - overhead == pytest.approx(2 * (near.compute[1] - overhead))


def test_a_link_bound_step_takes_its_transfers_and_their_slowdown():
    """Transfers at 5 GB/s take 1.5 times as long while compute, which is shorter, runs."""
    probe = sample_probe()
    for entry in probe["gemms"]["far"]:
        entry["seconds"] /= 20
    machine, _ = machine_from_probe(probe)
    placement = place("all_far", LLAMA.sublayers)
    rest = compute_times(LLAMA, machine, DECODE, placement).rest
    step = predict_step(LLAMA, machine, placement, DECODE)
    alone = placement.far_bytes / 5e9
    assert alone < step.seconds - rest < 1.5 * alone
    assert step.stall_seconds > 0.5 * step.seconds
    assert step.link_seconds == pytest.approx(alone, rel=1e-3)


# Concurrent compute and transfers -------------------------------------------------------


def test_both_are_slower_only_while_both_run():
    """Four sublayers of 1 s each overlap a transfer of 0.5 s, which takes 1 s meanwhile."""
    times = ComputeTimes(compute=(1.0,) * 4)
    step = pipeline_step_time([0.5] * 4, times, Slowdown(compute=2.0, link=2.0))
    # 1 s together does 0.5 s of work of each; the other 0.5 s of compute runs alone.
    assert step.seconds == pytest.approx(4 * 1.5)
    assert step.stall_seconds == pytest.approx(0.0)


def test_a_slow_link_is_waited_for_at_its_own_speed():
    times = ComputeTimes(compute=(1.0,) * 4)
    step = pipeline_step_time([3.0] * 4, times, Slowdown(compute=1.5, link=3.0))
    # 1.5 s together do 0.5 s of the transfer; 2.5 s of it remain.
    assert step.seconds == pytest.approx(4 * (1.5 + 2.5))
    assert step.stall_seconds == pytest.approx(4 * 2.5)
