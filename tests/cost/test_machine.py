# SPDX-License-Identifier: Apache-2.0
"""Machines: every figure says where it comes from."""

import pytest

import vllm_tiered.cost.machine as machines
from vllm_tiered.cost.machine import machine, machine_names


def test_every_machine_has_its_figures_and_their_sources():
    assert set(machine_names()) == {
        "cpu-2core",
        "cpu-2core-ssd",
        "gh200",
        "h200-pcie5",
        "rtx4090-pcie4",
    }
    for name in machine_names():
        assert machine(name).read_gb_per_s < machine(name).near_gb_per_s


def test_unknown_machines_name_the_known_ones():
    with pytest.raises(
        KeyError, match="no machine 'a100'; there are cpu-2core, cpu-2core-ssd, gh200"
    ):
        machine("a100")


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
        gh200 = (machines._MACHINES / "gh200.toml").read_text(encoding="utf-8")
        head, _, tail = gh200.partition("[tflops]")
        text = head + "[tflops]" + tail.replace("source", "sauce", 1)
    (tmp_path / "odd.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(machines, "_MACHINES", tmp_path)
    with pytest.raises(ValueError, match=message):
        machine.__wrapped__("odd")
