# SPDX-License-Identifier: Apache-2.0
"""Machines: every figure states its source."""

import dataclasses
import os
import re

import pytest

import vllm_tiered.planner.machine as machines
from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.from_probe import load_machine
from vllm_tiered.planner.machine import load_profile, profile_names


def test_every_machine_has_its_figures_and_their_sources():
    assert set(profile_names()) == {
        "a100-cxl-asic",
        "a100-cxl-fpga",
        "a100-dram-cxl-fpga",
        "a100-memory-mode",
        "a100-optane",
        "cpu-2core",
        "cpu-2core-ssd",
        "gh200",
        "h200-dram-cxl-asic",
        "h200-pcie5",
        "m1-max",
        "rtx3090-pcie4",
        "rtx4090-pcie4",
    }
    for name in profile_names():
        assert load_profile(name).read_gb_per_s < load_profile(name).near_gb_per_s


def test_unknown_machines_name_the_known_ones():
    with pytest.raises(
        KeyError, match="no machine 'a100'; there are a100-cxl-asic, a100-cxl-fpga, a100-dram-cxl"
    ):
        load_profile("a100")


def test_what_a_machine_draws_is_known_or_not():
    for name in profile_names():
        power = load_profile(name).power
        assert (power is None) == (name in ("cpu-2core", "cpu-2core-ssd"))
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


def test_a_file_of_ones_own_has_the_form_of_the_profiles(tmp_path):
    text = (machines._PROFILES / "gh200.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("value = 419", "value = 100"), encoding="utf-8")
    machine, figures = load_machine(str(path))
    assert machine.read_gb_per_s == 100
    assert dataclasses.replace(machine, read_gb_per_s=419.0) == load_profile("gh200")
    assert figures["read_gb_per_s"]["kind"] == "published"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value = 419", "value = -1", "read_gb_per_s is -1, and must be a number above 0"),
        ("value = 419", "value = true", "read_gb_per_s is True, and must be a number"),
        ("value = 419", 'value = "fast"', "read_gb_per_s is 'fast', and must be a number"),
        ("value = 419", "value = ", "Invalid value"),
        ("[read_gb_per_s]", "[read]", "figures missing or unknown: read, read_gb_per_s"),
        ('kind = "published"', 'kind = "known"', "needs a source and a kind"),
        ('kind = "published"', 'kind = ["a"]', "read_gb_per_s needs a source and a kind"),
        ("source = ", "source = [1] # ", "read_gb_per_s needs a source and a kind"),
        ("value = 419", "value = inf", "read_gb_per_s is inf, and must be a number above 0"),
        ("value = 419", "value = nan", "read_gb_per_s is nan, and must be a number above 0"),
        ("value = 419", f"value = 1{'0' * 400}", f"read_gb_per_s is 1{'0' * 59}..., and must be"),
        ("value = 419", f"value = 0x{'f' * 9999}", "read_gb_per_s is a number of thousands of"),
        ("value = 419", f"value = {'[' * 5000}", "more than 64 tables and lists"),
        ("value = 419", f"value = {'{a = ' * 2000}", "more than 64 tables and lists"),
        ("value = 419", f"value.{'a.' * 2000}a = 1", "more than 64 tables and lists"),
        ("value = 419", f"value = 419 # {'x' * 40_000}", "more than 32.00 KiB"),
    ],
    ids=lambda text: re.sub(r"(.)\1{9,}|(.{2,5}?)\2{9,}", r"\1\2*", text)[:50],
)
def test_a_file_with_an_odd_figure_is_refused(tmp_path, old, new, message):
    text = (machines._PROFILES / "gh200.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: .*{re.escape(message)}"):
        load_machine(str(path))


@pytest.mark.parametrize("gib", ["inf", "nan", "1e300", f"1{'0' * 400}"], ids=lambda s: s[:5])
def test_a_capacity_that_no_memory_has_is_refused(tmp_path, gib):
    text = (machines._PROFILES / "h200-dram-cxl-asic.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(r"(?m)^capacity_gib = .*", f"capacity_gib = {gib}", text))
    with pytest.raises(ConfigError, match=r"mine.toml: capacity_gib of \S.* must be a number"):
        load_machine(str(path))


@pytest.mark.parametrize("name", ["mine.toml", "probe.json"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}: is not a regular file"):
        load_machine(str(tmp_path / name))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"mine.toml: cannot be read: No such file"):
        load_machine(str(tmp_path / "mine.toml"))
