# SPDX-License-Identifier: Apache-2.0
"""Grafana's dashboard and the alerts: generated, valid, and of metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from vllm.v1.metrics import loggers

from scripts import dashboard
from vllm_tiered.adapter.telemetry import figures

RULES = dashboard.PATH.with_name("vllm_tiered.rules.yml")


def known_metrics() -> set[str]:
    """The names on /metrics of this plugin, and the texts in vLLM's own table of metrics."""
    ours = {f"{metric.name}_total" for metric in figures.COUNTER_METRICS}
    ours |= {metric.name for metric in figures.GAUGE_METRICS} | {figures.PART_ACTIVE}
    ours |= {f"{name}_{end}" for name in figures.STEP_HISTOGRAMS for end in ("bucket", "sum")}
    return {f"{figures.PREFIX}{name}" for name in ours}


def is_vllms(name: str) -> bool:
    return f'"{name.removesuffix("_total")}"' in Path(loggers.__file__).read_text()


def test_the_file_is_the_generated_one():
    assert dashboard.PATH.read_text() == dashboard.text(), "run python -m scripts.dashboard"


def test_every_metric_of_the_dashboard_and_the_alerts_exists():
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    names = dashboard.metric_names([*dashboard.all_queries()])
    for rule in rules:
        names |= {
            name.split("[")[0].split(" ")[0] for name in dashboard.metric_names([rule["expr"]])
        }
    ours = {name for name in names if name.startswith(figures.PREFIX)}
    assert ours - known_metrics() == set()
    assert {name for name in names - ours if not is_vllms(name)} == set()
    assert not is_vllms("vllm:num_preemption_total")


def test_the_reasons_that_the_alerts_name_exist():
    named = re.findall(r'reason=~"([^"]*)"', RULES.read_text())
    assert named
    assert {reason for each in named for reason in each.split("|")} <= set(figures.PART_REASONS)


def test_every_metric_is_on_the_dashboard():
    shown = dashboard.metric_names(dashboard.all_queries())
    left_out = {name for name in known_metrics() - shown if not name.endswith("_sum")}
    assert {name.removeprefix(figures.PREFIX) for name in left_out} == {
        "co2e_grams_total",  # joules times a constant
        "kv_partial_blocks_far",
        "kv_steps_total",
        "kv_storage_failed",  # an alert, and a reason of the part
        "weights_read_seconds_total",
        "weights_step_stall_seconds_bucket",
        "ffn_wait_seconds_total",
    }


def test_it_is_valid_for_grafana():
    from grafana_foundation_sdk.models import dashboard as models

    made = json.loads(dashboard.text())
    parsed = models.Dashboard.from_json(made)
    assert [panel.title for panel in parsed.panels or []] == [p["title"] for p in made["panels"]]
    assert parsed.tags == ["vllm"] and len(parsed.templating.list_val or []) == 5


def test_panels_do_not_overlap_and_say_what_is_bad():
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        where = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(where["x"], where["x"] + where["w"])
            for y in range(where["y"], where["y"] + where["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or len(panel["description"]) > 40


@pytest.mark.parametrize("command", [["check", "rules"], ["test", "rules"]], ids=" ".join)
def test_the_alerts_fire_when_they_should(command):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    file = RULES if command[0] == "check" else RULES.with_name("vllm_tiered.rules.test.yml")
    done = subprocess.run(
        ["promtool", *command, file.name], cwd=RULES.parent, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
