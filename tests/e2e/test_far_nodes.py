# SPDX-License-Identifier: Apache-2.0
"""Far weights on two NUMA nodes of different speed, emulated under the real engine."""

import pytest
from vllm.model_executor.offloader import get_offloader

from tests.e2e.harness import engine, generate, random_prompts, vllm_tokens
from tests.fakes.far_nodes import Bindings, EmulatedDevice, emulate_nodes, home_node, node_with
from vllm_tiered.adapter.weights import offloader
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.units import GIB, MIB
from vllm_tiered.weights.layout import BUFFER_ALIGNMENT

PROMPTS = random_prompts(4, seed=5)
KV_OFF = {"enabled": False}
FAST, SLOW = 1, 2
FAST_BYTES = 2 * MIB


@pytest.fixture
def bindings(monkeypatch) -> Bindings:
    """Two nodes beside the engine's own: 2 MiB at 800 MB/s, and 1 GiB at 100 MB/s."""
    monkeypatch.setattr(offloader, "make_device", EmulatedDevice)
    nodes = [home_node(), node_with(SLOW, GIB), node_with(FAST, FAST_BYTES)]
    throttles = {FAST: Throttle(800e6), SLOW: Throttle(100e6)}
    return emulate_nodes(monkeypatch, nodes, throttles)


def test_each_sublayer_lies_on_both_nodes_and_tokens_are_equal(bindings, caplog_vllm) -> None:
    expected = vllm_tokens("opt", PROMPTS)
    with engine("opt", KV_OFF, weights={"placement": "all_far"}) as llm:
        weights = get_offloader()._weights
        nodes = bindings.nodes_of_pages(weights._far)
        assert set(nodes) == {FAST, SLOW}
        assert nodes.count(FAST) * BUFFER_ALIGNMENT == FAST_BYTES, "the fast node is full"
        fast_share = nodes.count(FAST) / len(nodes)
        for extent in weights._extents:
            pages = nodes[extent.far_page : extent.far_page + extent.num_far_pages]
            assert abs(pages.count(FAST) - fast_share * len(pages)) <= 1
        bindings.read_bytes.clear()
        assert generate(llm, PROMPTS) == expected
        read = bindings.read_bytes
        assert read[FAST] / (read[FAST] + read[SLOW]) == pytest.approx(fast_share, abs=0.02)
        assert not read[0], "nothing is left to the engine's own node"
    assert (
        "GB/s from 1, " in caplog_vllm.text and "each sublayer over all of them" in caplog_vllm.text
    )


@pytest.mark.parametrize("node", [FAST, SLOW])
def test_damaged_bytes_of_a_node_change_the_tokens(bindings, node) -> None:
    expected = vllm_tokens("opt", PROMPTS)
    with engine("opt", KV_OFF, weights={"placement": "all_far"}) as llm:
        far = get_offloader()._weights._far
        pages = [page for page, at in enumerate(bindings.nodes_of_pages(far)) if at == node]
        intact = far.data[pages]
        far.data[pages] = intact.flip(1)
        assert generate(llm, PROMPTS) != expected
        far.data[pages] = intact
        generate(llm, PROMPTS)  # buffers hold damaged weights until their next load
        assert generate(llm, PROMPTS) == expected


@pytest.mark.parametrize(
    ("placement", "near_gib", "options"),
    [("latency", 0.004, {}), ("throughput", 0.0075, {"kv_cache_memory_bytes": None})],
    ids=["latency", "throughput"],
)
def test_it_is_planned_with_what_the_nodes_are_together(
    bindings, placement, near_gib, options
) -> None:
    expected = vllm_tokens("opt", PROMPTS)
    weights = {"placement": placement, "near_gib": near_gib}
    with engine("opt", KV_OFF, weights=weights, **options) as llm:
        far_bytes = get_offloader().placement.far_bytes
        assert far_bytes > FAST_BYTES
        nodes = bindings.nodes_of_pages(get_offloader()._weights._far)
        assert nodes.count(FAST) * BUFFER_ALIGNMENT == FAST_BYTES
        assert generate(llm, PROMPTS) == expected
        # The link takes most of such a step: what exceeds 2 MiB is read at 100 MB/s.
        seconds = (far_bytes - FAST_BYTES) / 100e6
        assert 0.8 * seconds < get_offloader()._chooser.expected_step.seconds < 3 * seconds


def test_two_nodes_with_room_share_by_bandwidth(monkeypatch) -> None:
    """Both reads of a sublayer end together: three quarters of it are on the node of 300 MB/s."""
    monkeypatch.setattr(offloader, "make_device", EmulatedDevice)
    nodes = [home_node(), node_with(SLOW, GIB), node_with(FAST, GIB)]
    bindings = emulate_nodes(monkeypatch, nodes, {FAST: Throttle(300e6), SLOW: Throttle(100e6)})
    expected = vllm_tokens("opt", PROMPTS)
    with engine("opt", KV_OFF, weights={"placement": "all_far"}) as llm:
        weights = get_offloader()._weights
        nodes_of_pages = bindings.nodes_of_pages(weights._far)
        assert set(nodes_of_pages) == {FAST, SLOW}
        total = len(nodes_of_pages) * BUFFER_ALIGNMENT
        # Parts of the buffer are whole MiB, and other processes may slow a measurement.
        assert abs(nodes_of_pages.count(FAST) * BUFFER_ALIGNMENT - 0.75 * total) < 2 * MIB
        assert generate(llm, PROMPTS) == expected
