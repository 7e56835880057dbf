# SPDX-License-Identifier: Apache-2.0
"""What GEMMs with few bits are taken to cost: by a factor of the machine, and in words."""

import dataclasses

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from tests.fixtures.probes import sample_probe
from vllm_tiered.planner.assumptions import describe_gemms
from vllm_tiered.planner.from_probe import machine_from_probe
from vllm_tiered.planner.machine import load_profile, profile_names, provenance
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.step_time import Batch, roofline

PLAIN = model_shape(LLAMA_3_8B)
INT4 = model_shape(LLAMA_3_8B, compress="int4")
AWQ = dataclasses.replace(INT4, quantization="awq 4 bit")
GPU = load_profile("rtx4090-pcie4")


@pytest.mark.parametrize("tokens", [1, 4096], ids=["memory", "arithmetic"])
def test_a_gemm_in_4_bit_takes_its_factor_of_the_time_in_16_bit(tokens):
    batch = Batch(requests=1, new_tokens=tokens, context_tokens=0)
    plain, small = (
        roofline(shape.sublayers[1], shape, GPU, batch).seconds for shape in (PLAIN, INT4)
    )
    # The norm is not compressed.
    assert GPU.int4_compute_factor is not None
    assert small == pytest.approx(GPU.int4_compute_factor * plain, rel=1e-3)


def test_a_checkpoints_own_format_has_no_such_factor():
    batch = Batch(requests=1, new_tokens=1, context_tokens=0)
    plain, small = (
        roofline(shape.sublayers[1], shape, GPU, batch).seconds for shape in (PLAIN, AWQ)
    )
    assert small == pytest.approx(0.625 / 2 * plain, rel=1e-3)


def test_every_gpu_has_an_assumption_with_its_source():
    for name in profile_names():
        figures = provenance(name)
        assert ("int4_compute_factor" in figures) == (not name.startswith("cpu-"))
        if "int4_compute_factor" in figures:
            assert figures["int4_compute_factor"]["kind"] == "assumed"
            assert "HeLM, figure 6" in str(figures["int4_compute_factor"]["source"])


def test_without_few_bits_nothing_is_said():
    assert describe_gemms(PLAIN, GPU) is None


@pytest.mark.parametrize(
    ("shape", "machine", "words"),
    [
        (INT4, GPU, "take 2.5 times as long as in 16 bit (--json names the source"),
        (INT4, load_profile("cpu-2core"), "read their bytes and multiply as fast as in 16 bit"),
        (INT4, machine_from_probe(sample_probe())[0], "as the probe measured none"),
        (AWQ, GPU, "weights in awq 4 bit read the bytes of their format"),
        (AWQ, machine_from_probe(sample_probe())[0], "take as long as without quantisation"),
    ],
    ids=["factor", "profile", "probe", "checkpoint", "checkpoint-probe"],
)
def test_what_is_assumed_is_said(shape, machine, words):
    said = describe_gemms(shape, machine)
    assert said is not None and said.startswith("Assumed: ") and words in said


def test_what_was_measured_is_no_assumption():
    probe = sample_probe()
    probe["gemms"]["int4"] = probe["gemms"]["near"]
    said = describe_gemms(INT4, machine_from_probe(probe)[0])
    assert said == "Matmuls with weights in 4 bit take as long as the probe measured."


def test_a_checkpoints_kernel_may_be_measured_too():
    probe = sample_probe()
    probe["gemms"]["w4a16"] = probe["gemms"]["near"]
    machine = machine_from_probe(probe)[0]
    said = describe_gemms(dataclasses.replace(AWQ, quantized_bits=4), machine)
    assert said == "Matmuls with weights in awq 4 bit take as long as the probe measured."
    said = describe_gemms(dataclasses.replace(AWQ, quantized_bits=8), machine)
    assert said is not None and said.startswith("Assumed: ")
