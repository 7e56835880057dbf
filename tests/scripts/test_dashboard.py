# SPDX-License-Identifier: Apache-2.0
"""Grafana's dashboard and the alerts: generated, valid, and of metrics that exist."""

import enum
import json
import re
import shutil
import subprocess
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard as models
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
        "embodied_co2e_grams_total",  # seconds times a constant
        "kv_partial_blocks_far",
        "kv_steps_total",
        "kv_storage_failed",  # an alert, and a reason of the part
        "weights_read_seconds_total",
        "weights_steps_total",
        "weights_step_stall_seconds_bucket",
        "ffn_wait_seconds_total",
    }


def schema_errors(made: dict[str, Any]) -> list[str]:
    """What of a dashboard is unknown or wrongly typed in the models made from Grafana's schema.

    `from_json` itself takes anything, so types are compared with the models' annotations, and
    fields that the models do not know are those that do not survive.
    """
    plugins.register_default_plugins()
    try:
        parsed = models.Dashboard.from_json(made)
    except Exception as error:  # each decoder raises what its first wrong access raises
        return [f"not read: {error!r}"]
    kept = json.loads(json.dumps(parsed, cls=encoder.JSONEncoder))
    return [*_wrong_types(parsed, "dashboard"), *_lost(made, kept, "dashboard")]


def _wrong_types(value: Any, where: str) -> list[str]:
    if isinstance(value, list):
        return [
            e for index, item in enumerate(value) for e in _wrong_types(item, f"{where}[{index}]")
        ]
    if not hasattr(value, "to_json") or isinstance(value, enum.Enum):
        return []
    hints = typing.get_type_hints(type(value).__init__)
    found = []
    for name, item in vars(value).items():
        if name in hints and not _matches(item, hints[name]):
            found.append(f"{where}.{name}: {item!r} is not {hints[name]}")
        else:
            found += _wrong_types(item, f"{where}.{name}")
    return found


def _matches(value: Any, hint: Any) -> bool:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, each) for each in of)
    if origin is typing.Literal:
        return value in of
    if origin is list:
        return isinstance(value, list) and all(_matches(item, of[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(item, of[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    return not isinstance(hint, type) or isinstance(value, hint)


def _lost(ours: Any, kept: Any, where: str) -> list[str]:
    if isinstance(ours, dict) and isinstance(kept, dict):
        return [
            e for key, value in ours.items() for e in _lost(value, kept.get(key), f"{where}.{key}")
        ]
    if isinstance(ours, list) and isinstance(kept, list) and len(ours) == len(kept):
        return [
            e
            for index, (a, b) in enumerate(zip(ours, kept, strict=True))
            for e in _lost(a, b, f"{where}[{index}]")
        ]
    return [] if ours == kept else [f"{where}: {ours!r} is read as {kept!r}"]


def test_it_is_valid_for_grafana():
    made = json.loads(dashboard.text())
    assert schema_errors(made) == []
    assert made["tags"] == ["vllm"]
    assert [v["name"] for v in made["templating"]["list"]] == ["datasource", *dashboard.VARIABLES]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda made: made.update(title=5), id="type"),
        pytest.param(lambda made: made.update(nonsense=1), id="unknown"),
        pytest.param(lambda made: made["panels"][1].update(gridPos="no"), id="position"),
        pytest.param(lambda made: made["panels"][1]["options"].update(textMode=3), id="options"),
        pytest.param(lambda made: made["templating"]["list"][1].update(refresh="often"), id="enum"),
    ],
)
def test_the_schema_check_refuses(damage):
    made = json.loads(dashboard.text())
    damage(made)
    assert schema_errors(made)


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
