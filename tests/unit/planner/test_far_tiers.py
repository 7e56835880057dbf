# SPDX-License-Identifier: Apache-2.0
"""Far memory of several tiers: their mean bandwidth, what interleaving gains, plans with them."""

from dataclasses import replace

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.cli.plan_tables import far_tiers_line
from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.far_tiers import FarTier, FarTiers
from vllm_tiered.planner.fit import Fit, evaluate_placements
from vllm_tiered.planner.from_probe import load_machine
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.pipeline_time import ComputeTimes, pipeline_step_time
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import Batch, far_link, predict_step
from vllm_tiered.units import GIB
from vllm_tiered.weights.placement import place

GB = 10**9
FAST, SLOW = FarTier("DRAM", 10 * GB, 20.0), FarTier("CXL", 30 * GB, 5.0)
LLAMA = model_shape(LLAMA_3_8B)


@pytest.mark.parametrize(
    ("num_bytes", "parts", "mean", "following"),
    [
        (0, [0, 0], 20.0, 20.0),
        (8 * GB, [8 * GB, 0], 20.0, 20.0),
        (10 * GB, [10 * GB, 0], 20.0, 5.0),
        # 10 GB in 0.5 s, 10 GB in 2 s.
        (20 * GB, [10 * GB, 10 * GB], 8.0, 5.0),
        # More than there is counts as in the last tier: 0.5 s and 8 s.
        (50 * GB, [10 * GB, 40 * GB], 50 / 8.5, 5.0),
    ],
)
def test_tiers_are_filled_in_order_and_read_in_turn(num_bytes, parts, mean, following):
    tiers = FarTiers((FAST, SLOW))
    assert tiers.bytes_by_tier(num_bytes) == parts
    assert tiers.gb_per_s(num_bytes) == pytest.approx(mean)
    assert tiers.next_gb_per_s(num_bytes) == following


@pytest.mark.parametrize(
    ("num_bytes", "parts", "together", "following"),
    [
        (0, [0, 0, 0], 20.0, 20.0),
        # 8 and 2 GB in 0.4 s each.
        (10 * GB, [8 * GB, 2 * GB, 0], 25.0, 20.0),
        # The fast one is full, and the slow one takes 1.2 s for the rest.
        (16 * GB, [10 * GB, 6 * GB, 0], 16 / 1.2, 5.0),
        # Both are full: 6 s of the slow one, and meanwhile 10 GB of the engine's own memory.
        (50 * GB, [10 * GB, 30 * GB, 10 * GB], 50 / 6, 40.0),
    ],
)
def test_tiers_that_are_read_at_once_share_by_bandwidth(num_bytes, parts, together, following):
    own = FarTier("node 0", 60 * GB, 40.0)
    tiers = FarTiers((FAST, SLOW, own), at_once=True)
    assert tiers.bytes_by_tier(num_bytes) == parts
    assert tiers.gb_per_s(num_bytes) == pytest.approx(together)
    assert tiers.next_gb_per_s(num_bytes) == following


@pytest.mark.parametrize("prefetch_depth", [1, 2, 3])
def test_equal_shares_beat_filling_in_order(prefetch_depth):
    """Compute of 1.5 s hides a transfer of 1 s and not one of 2 s, but both hide as 1.5 s each.

    In order: half of the sublayers take max(1.5, 1), half max(1.5, 2): at depth 1 a quarter of a
    second a sublayer is waited for. A greater depth hides little more: half of the step is slow.
    """
    count = 48
    times = ComputeTimes(compute=(1.5,) * count)
    in_order = pipeline_step_time(
        [1.0] * (count // 2) + [2.0] * (count // 2), times, prefetch_depth=prefetch_depth
    )
    interleaved = pipeline_step_time([1.5] * count, times, prefetch_depth=prefetch_depth)
    assert interleaved.seconds == pytest.approx(1.5 * count)
    assert interleaved.stall_seconds == pytest.approx(0, abs=1e-9)
    hidden_by_depth = 1.5 * (prefetch_depth - 1)
    assert in_order.seconds >= 1.75 * count - hidden_by_depth


def test_what_the_link_bounds_gains_nothing():
    """A decode step of far weights behind PCIe: each transfer is longer than compute."""
    times = ComputeTimes(compute=(0.1,) * 8)
    in_order = pipeline_step_time([1.0] * 4 + [4.0] * 4, times)
    assert in_order.seconds == pytest.approx(pipeline_step_time([2.5] * 8, times).seconds)


def test_one_tier_changes_no_figure():
    plain = load_profile("a100-cxl-fpga")
    one = replace(plain, far_tiers=FarTiers((FarTier("CXL", 512 * GIB, plain.read_gb_per_s),)))
    load = Workload(prompt_tokens=512, output_tokens=128, max_requests=16)
    given = (LLAMA, load, 8 * GIB, 64 * GIB)
    expected = list(evaluate_placements(given[0], plain, *given[1:]))
    assert list(evaluate_placements(given[0], one, *given[1:])) == expected


def test_a_step_between_those_of_its_tiers():
    """Llama 3 8B's 13 GiB of far weights: 6 in DRAM and the rest in CXL."""
    profile = load_profile("a100-dram-cxl-fpga")
    dram, cxl = (tier._replace(capacity_bytes=6 * GIB) for tier in profile.far_tiers)
    placement = place("all_far", LLAMA.sublayers)
    batch = Batch(requests=1, new_tokens=1, context_tokens=512)

    def seconds(*tiers):
        machine = replace(profile, far_tiers=FarTiers(tiers))
        return predict_step(LLAMA, machine, placement, batch).seconds

    far = placement.far_bytes
    expected = 6 * GIB / 24.6e9 + (far - 6 * GIB) / 5.12e9
    machine = replace(profile, far_tiers=FarTiers((dram, cxl)))
    assert far_link(machine, far).bytes_per_s == pytest.approx(far / expected)
    assert seconds(dram) < seconds(dram, cxl) < seconds(cxl)


def test_no_tier_is_faster_than_the_link(tmp_path):
    """HeLM's A100 behind PCIe 4.0, with CXL-ASIC's 28 GB/s beside DRAM's 24.6."""
    path = tmp_path / "mine.toml"
    text = _profile("a100-dram-cxl-fpga").replace(
        'value = 5.12\nkind = "pub', 'value = 28\nkind = "pub'
    )
    path.write_text(text, encoding="utf-8")
    machine, figures = load_machine(str(path))
    assert [tier.gb_per_s for tier in machine.far_tiers] == [24.6, 24.6]
    assert figures["CXL: read_gb_per_s"]["value"] == 28
    assert machine.far_tiers.capacity_bytes == 768 * GIB


def test_tiers_are_used_fastest_first_in_whatever_order_a_file_has_them(tmp_path):
    path = tmp_path / "mine.toml"
    head, dram, cxl = _profile("a100-dram-cxl-fpga").split("[[far_tiers]]")
    path.write_text(f"{head}[[far_tiers]]{cxl}\n[[far_tiers]]{dram}", encoding="utf-8")
    assert load_machine(str(path))[0] == load_profile("a100-dram-cxl-fpga")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("capacity_gib = 512\n", ""), "a far tier has capacity_gib, kind, name, source, value"),
        (("capacity_gib = 512", "capacity_gib = 0"), "capacity_gib of CXL is 0, and must be"),
        (('name = "CXL"', 'name = "DRAM"'), "two far tiers have the same name"),
        (('value = 5.12\nkind = "pub', 'value = -1\nkind = "pub'), "read_gb_per_s is -1"),
        (
            ('kind = "published"\nsource = "HeLM, table', 'kind = "x"\nsource = "HeLM, table'),
            "kind",
        ),
    ],
)
def test_tiers_that_are_refused(tmp_path, change, message):
    path = tmp_path / "mine.toml"
    text = _profile("a100-dram-cxl-fpga")
    assert change[0] in text
    path.write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_machine(str(path))


def test_the_plan_says_what_lies_where():
    profile = load_profile("a100-dram-cxl-fpga")
    dram, cxl = profile.far_tiers
    tiers = FarTiers((dram._replace(capacity_bytes=8 * GIB), cxl))
    machine = replace(profile, far_tiers=tiers)
    load = Workload(prompt_tokens=512, output_tokens=128, max_requests=4)
    (fit,) = evaluate_placements(LLAMA, machine, load, 8 * GIB, 64 * GIB, names=["all_far"])
    assert isinstance(fit, Fit)
    line = far_tiers_line(fit, machine)
    assert "8.00 GiB in DRAM (24.6 GB/s), 5.00 GiB in CXL (5.1 GB/s); " in line


def _profile(name):
    from vllm_tiered.planner.machine import _PROFILES

    return (_PROFILES / f"{name}.toml").read_text(encoding="utf-8")
