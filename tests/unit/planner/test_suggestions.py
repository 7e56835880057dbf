# SPDX-License-Identifier: Apache-2.0
"""Suggestions: with each of them the model fits, or is predicted to be served faster."""

import dataclasses
import re

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from tests.unit.planner.test_built_model import FULL, MIXTURE, facts
from vllm_tiered.planner.built_model import shape_of
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.plan import Case
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.suggestions import requantised, suggest
from vllm_tiered.units import GIB
from vllm_tiered.weights.layout import Role

LLAMA = model_shape(LLAMA_3_8B)
LOAD = Workload(prompt_tokens=512, output_tokens=128)


def case(near_gib, far_gib=64.0, *, load=LOAD, shape=LLAMA, target="throughput"):
    return Case(
        shape=shape,
        machine=load_profile("rtx4090-pcie4"),
        load=load,
        near_bytes=int(near_gib * GIB),
        far_bytes=int(far_gib * GIB),
        target=target,
    )


def changes(asked):
    return {suggestion.change: suggestion.served for suggestion in suggest(asked)}


def test_matrices_have_the_bits_and_the_rest_stays():
    small = requantised(LLAMA, 4.5)
    for old, new in zip(LLAMA.sublayers, small.sublayers, strict=True):
        for before, after in zip(old.parameters, new.parameters, strict=True):
            is_matrix = before.role in (Role.MATRIX, Role.FFN_FIRST)
            share = 4.5 / 16 if is_matrix else 1
            assert after.num_bytes == pytest.approx(share * before.num_bytes, abs=1)
            assert small.weights_in(after) == LLAMA.weights_in(before)
    assert small.other_bytes == LLAMA.other_bytes
    mixture = shape_of(facts(layers=[MIXTURE], kv=[FULL]))
    (experts,) = (
        p for s in requantised(mixture, 8).sublayers for p in s.parameters if "w2_weight" in p.name
    )
    assert experts.num_bytes == 8 * 64 * 32


def test_what_does_not_fit_for_near_memory_fits_with_what_is_suggested():
    asked = case(2)
    assert not asked.plan().fits
    (change,) = (change for change in changes(asked) if "more near memory" in change)
    found = re.search(r"\(([\d.]+) GiB\)", change)
    assert found is not None
    enough = float(found[1])
    assert 2 < enough < 4
    assert case(enough + 0.01).plan().fits
    assert not case(enough - 0.02).plan().fits


def test_what_does_not_fit_for_far_memory_fits_with_a_disk_or_more_of_it():
    found = changes(case(6, 2))
    assert "weights on an SSD (--storage)" in found
    (more,) = (change for change in found if "more far memory" in change)
    (tier,) = (change for change in found if change.startswith("one more tier, "))
    assert "of CXL memory at 28 GB/s" in tier
    assert found[tier].tokens_per_s == pytest.approx(found[more].tokens_per_s), "a link of 25 GB/s"
    assert any(change.startswith("a variant in 4-bit") for change in found)
    all_near = found["a variant in 4-bit (AWQ, GPTQ, MXFP4)"]
    assert all_near.tokens_per_s > found["weights on an SSD (--storage)"].tokens_per_s


def test_memory_that_is_slower_than_the_link_serves_slower():
    """The H200's link has 55 GB/s, so what lies in CXL memory takes twice as long."""
    h200 = dataclasses.replace(case(6, 2), machine=load_profile("h200-pcie5"))
    found = changes(h200)
    (more,) = (change for change in found if "more far memory" in change)
    (tier,) = (change for change in found if change.startswith("one more tier, "))
    assert found[tier].tokens_per_s < 0.8 * found[more].tokens_per_s


def test_one_more_tier_is_behind_those_that_may_be_used_now():
    """The machine has more DRAM than far memory may take, and CXL memory that is not used yet."""
    asked = dataclasses.replace(case(6, 2), machine=load_profile("h200-dram-cxl-asic"))
    found = changes(asked)
    (more,) = (change for change in found if "more far memory" in change)
    (tier,) = (change for change in found if change.startswith("one more tier, "))
    assert found[tier].tokens_per_s < 0.8 * found[more].tokens_per_s


def test_shorter_prompts_are_suggested_where_a_long_one_does_not_fit():
    load = dataclasses.replace(LOAD, prompt_tokens=30_000)
    (change,) = (c for c in changes(case(5, load=load)) if c.startswith("prompts of at most"))
    tokens = int(change.split()[-2])
    assert 10_000 < tokens < 30_000
    shorter = dataclasses.replace(load, prompt_tokens=tokens)
    assert case(5, load=shorter).plan().fits


@pytest.mark.parametrize("target", ["latency", "throughput"])
def test_what_fits_may_be_faster(target):
    asked = case(8, target=target)
    now, found = asked.plan().best, changes(asked)
    assert any("4-bit" in change for change in found)
    assert any("more (12.00 GiB)" in change for change in found)
    for served in found.values():
        if target == "latency":
            assert served.decode_seconds < now.decode_seconds
        else:
            assert served.tokens_per_s > now.tokens_per_s


def test_a_quantised_model_is_not_to_be_quantised_again():
    assert not any("variant" in change for change in changes(case(3, shape=requantised(LLAMA, 8))))
