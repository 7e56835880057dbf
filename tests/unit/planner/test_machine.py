# SPDX-License-Identifier: Apache-2.0
"""Machines: every figure states its source."""

import pytest

import vllm_tiered.planner.machine as machines
from vllm_tiered.planner.machine import load_profile, profile_names


def test_every_machine_has_its_figures_and_their_sources():
    assert set(profile_names()) == {
        "a100-optane",
        "cpu-2core",
        "cpu-2core-ssd",
        "gh200",
        "h200-pcie5",
        "m1-max",
        "rtx3090-pcie4",
        "rtx4090-pcie4",
    }
    for name in profile_names():
        assert load_profile(name).read_gb_per_s < load_profile(name).near_gb_per_s


def test_unknown_machines_name_the_known_ones():
    with pytest.raises(
        KeyError, match="no machine 'a100'; there are a100-optane, cpu-2core, cpu-2core-ssd, gh200"
    ):
        load_profile("a100")


def test_what_a_machine_draws_is_known_or_not():
    for name in profile_names():
        power = load_profile(name).power
        assert (power is None) == (name in ("cpu-2core", "cpu-2core-ssd", "gh200"))
        if power is not None:
            assert 0 < power.near_idle_watts < power.near_active_watts


def test_half_of_the_power_figures_are_no_figures(monkeypatch, tmp_path):
    text = (machines._PROFILES / "m1-max.toml").read_text(encoding="utf-8")
    head, _, tail = text.partition("[near_idle_watts]")
    (tmp_path / "odd.toml").write_text(head + tail[tail.index("[") :], encoding="utf-8")
    monkeypatch.setattr(machines, "_PROFILES", tmp_path)
    with pytest.raises(ValueError, match="figures missing or unknown: near_idle_watts"):
        load_profile.__wrapped__("odd")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tflops]\nvalue = 1\n", "figures missing or unknown: far_layer_overhead_us"),
        (None, "tflops needs a source and a kind"),
    ],
    ids=["missing", "without source"],
)
def test_figures_without_provenance_are_refused(monkeypatch, tmp_path, text, message):
    if text is None:
        gh200 = (machines._PROFILES / "gh200.toml").read_text(encoding="utf-8")
        head, _, tail = gh200.partition("[tflops]")
        text = head + "[tflops]" + tail.replace("source", "sauce", 1)
    (tmp_path / "odd.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(machines, "_PROFILES", tmp_path)
    with pytest.raises(ValueError, match=message):
        load_profile.__wrapped__("odd")
