# SPDX-License-Identifier: Apache-2.0
"""Links are scaled so that the paper's ratios hold, and batch sizes follow by arithmetic."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.suites.papers.helm_figures import FLEXGEN_PERCENTS, LINK_GB_PER_S, decode_ratios
from benchmarks.suites.weights import placement_plan as plan
from vllm_tiered.planner.latency_placement import place_for_latency
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.pipeline_time import Link
from vllm_tiered.weights.placement import place

SHAPE = model_shape(plan.opt_config(24))
FLEXGEN = place("flexgen", SHAPE.sublayers, FLEXGEN_PERCENTS)
HELM = place("helm", SHAPE.sublayers)
ALL_FAR = place("all_far", SHAPE.sublayers)
SECONDS = st.floats(1e-5, 1e-1)


def compute(attention=0.009, ffn=0.0174, rest=0.01):
    return plan.Compute(attention=attention, ffn=ffn, rest=rest)


def test_the_shape_is_opt_1_3b():
    weights = (SHAPE.layer_bytes + SHAPE.other_bytes) / 2
    assert weights == pytest.approx(1.3157e9, rel=0.001)  # of the checkpoint


def test_fewer_layers_keep_the_heads_share():
    small = model_shape(plan.opt_config(6))
    share = SHAPE.head_bytes / SHAPE.layer_bytes
    assert small.head_bytes / small.layer_bytes == pytest.approx(share, rel=0.001)


@given(attention=SECONDS, ffn=SECONDS)
def test_a_layers_ratio_is_table_ivs_by_construction(attention, ffn):
    """Both ratios, weighted by their loads, are the paper's, whatever the engine's compute time."""
    links = plan.scaled_links(SHAPE, compute(attention, ffn))
    over_ffn, over_attention = plan.ratios(ALL_FAR, compute(attention, ffn), links["nvdram"])
    paper_over_ffn, paper_over_attention = decode_ratios("all_far", "nvdram")
    # The FFN has twice the bytes of attention, except for a few biases.
    ours = (2 * over_ffn + over_attention) / 3
    assert ours == pytest.approx((2 * paper_over_ffn + paper_over_attention) / 3, rel=0.001)


def test_both_ratios_are_the_papers_where_compute_is_split_as_there():
    split = compute(attention=0.36 * 2, ffn=1.39)
    nvdram = plan.scaled_links(SHAPE, split)["nvdram"]
    for placement in (FLEXGEN, HELM, ALL_FAR):
        expected = decode_ratios(placement.policy, "nvdram")
        assert plan.ratios(placement, split, nvdram) == pytest.approx(expected, rel=0.03)


def test_links_are_to_each_other_as_the_papers():
    links = plan.scaled_links(SHAPE, compute())
    scales = {links[name] / gb for name, gb in LINK_GB_PER_S.items()}
    assert max(scales) == pytest.approx(min(scales))


def test_the_ratios_of_cxl_follow():
    links = plan.scaled_links(SHAPE, compute(attention=0.0091, ffn=0.0175))
    for name in ("cxl_fpga", "cxl_asic"):
        ours = plan.ratios(ALL_FAR, compute(attention=0.0091, ffn=0.0175), links[name])
        assert ours == pytest.approx(decode_ratios("all_far", name), rel=0.05)


@pytest.mark.parametrize("layers", [6, 24])
def test_the_card_has_room_that_helms_placement_leaves_idle(layers):
    """Near share: 38 GiB less embeddings 1.20, KV 0.65 and buffers 0.63, of 91.2 GiB of layers."""
    shape = model_shape(plan.opt_config(layers))
    helm = place("helm", shape.sublayers)
    card_share = (plan.card_near_bytes(shape) - helm.buffer_bytes) / shape.layer_bytes
    assert card_share == pytest.approx(35.5 / 91.2, abs=0.002)
    assert helm.resident_bytes / shape.layer_bytes == pytest.approx(1 / 3, abs=0.002)


def test_with_all_of_the_card_latency_is_expected_faster_on_three_links_of_four():
    links = plan.scaled_links(SHAPE, compute())
    over_helm = {}
    for name, speed in links.items():
        ours = place_for_latency(
            SHAPE.sublayers,
            compute().times(SHAPE),
            Link(bytes_per_s=speed),
            plan.card_near_bytes(SHAPE),
        )
        seconds = (plan.expected_seconds(SHAPE, one, compute(), speed) for one in (HELM, ours))
        over_helm[name] = next(seconds) / next(seconds)
    assert over_helm["nvdram"] > 1.12
    assert over_helm["cxl_fpga"] > 1.04
    assert over_helm["dram"] > 1.03
    assert over_helm["cxl_asic"] == pytest.approx(1.0, abs=0.005)


def test_ratios_of_a_layer_without_far_weights():
    near = place("flexgen", SHAPE.sublayers, (100, 0, 0))
    with pytest.raises(ValueError, match="flexgen has no far weights"):
        plan.ratios(near, compute(), 1e9)


def test_the_pipelines_model_expects_the_papers_gains():
    """Before any measurement the model predicted 29 % shorter steps and 5.3x the throughput."""
    links = plan.scaled_links(SHAPE, compute())
    seconds = {
        placement.policy: plan.expected_seconds(SHAPE, placement, compute(), links["nvdram"])
        for placement in (FLEXGEN, HELM, ALL_FAR)
    }
    assert 1 - seconds["helm"] / seconds["flexgen"] == pytest.approx(0.29, abs=0.01)
    assert seconds["all_far"] / seconds["flexgen"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("requests", [1, 7, 8])
def test_the_budget_holds_as_many_as_it_was_made_for(requests):
    budget = plan.near_budget(SHAPE, FLEXGEN, requests, 32)
    assert plan.largest_batch(SHAPE, FLEXGEN, budget, 32) == requests
    assert plan.largest_batch(SHAPE, FLEXGEN, budget - 1, 32) == requests - 1


def test_the_kv_cache_left_by_all_weights_far():
    """30 blocks of 32 tokens fit, where FlexGen has its near attention output matrices."""
    budget = plan.near_budget(SHAPE, FLEXGEN, 7, 32)
    assert plan.largest_batch(SHAPE, ALL_FAR, budget, 32) == 37
    assert plan.largest_batch(SHAPE, HELM, budget, 32) == 0


def test_in_flexgens_memory_all_cpu_is_the_most_that_can_be_served():
    """One more request gains more than its KV's bytes would as near weights, on any link."""
    near_bytes = plan.near_budget(SHAPE, FLEXGEN, 8, 32)
    for speed in plan.scaled_links(SHAPE, compute()).values():
        split = plan.planned_split(SHAPE, compute(), speed, near_bytes, 37, 32)
        assert split.served.requests == 37
        ours = plan.expected_seconds(SHAPE, split.placement, compute(), speed)
        assert ours == pytest.approx(plan.expected_seconds(SHAPE, ALL_FAR, compute(), speed), 0.01)


def test_in_helms_memory_unused_kv_space_holds_near_weights():
    near_bytes = plan.near_budget(SHAPE, HELM, 8, 32)
    for speed in plan.scaled_links(SHAPE, compute()).values():
        split = plan.planned_split(SHAPE, compute(), speed, near_bytes, 37, 32)
        assert split.served.requests == 37
        ours = plan.expected_seconds(SHAPE, split.placement, compute(), speed)
        assert ours < 0.9 * plan.expected_seconds(SHAPE, ALL_FAR, compute(), speed)
