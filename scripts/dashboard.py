# SPDX-License-Identifier: Apache-2.0
"""Makes `dashboards/vllm_tiered.json`, Grafana's dashboard of the `vllm:tiered_*` metrics.

It has the variables, the tag and the link of vLLM's own dashboards, so that it appears among them.

Usage: python -m scripts.dashboard [--check]
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "dashboards" / "vllm_tiered.json"
VARIABLES = ("job", "model_name", "instance", "engine")
_SELECTED = ", ".join(f'{name}=~"${name}"' for name in VARIABLES)
_WIDTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: its heading.
        help: what it shows, and what a bad value means.
        unit: Grafana's name of the unit.
        queries: PromQL by legend; `{}` in a query stands for the variables.
        kind: Grafana's type of panel.
        width: of the dashboard's 24 columns.
        text: what a panel of kind `stat` writes, Grafana's `textMode`.
    """

    title: str
    help: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 12
    text: str = "auto"


def _rate(name: str, by: str = "") -> str:
    return f"sum{by}(rate(vllm:tiered_{name}{{}}[$__rate_interval]))"


def _sum(name: str, by: str = "") -> str:
    return f"sum{by}(vllm:tiered_{name}{{}})"


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / ({_rate(whole)} > 0)"


def _quantile(share: float, name: str) -> str:
    buckets = f"rate(vllm:tiered_{name}_bucket{{}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le) ({buckets}))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "What is going on": (
        Panel(
            title="Parts",
            help="Each part with the reason why it is at work (*on*) or not. *storage_failed*: the "
            "KV cache goes on without its file. *nothing_to_swap*, *unsupported*, *no_gain*: "
            "switched on, and of no use here; GET /tiered says why.",
            unit="none",
            queries={
                "{{part}}: {{reason}}": "max by (part, reason) (vllm:tiered_part_active{} == 1)",
            },
            kind="stat",
            text="name",
        ),
        Panel(
            title="Expansion",
            help="Full KV blocks that fit, over those that near memory holds alone. 1: nothing is "
            "swapped. It follows the load; at its limit all the time: give more near memory.",
            unit="none",
            queries={"expansion": "max(vllm:tiered_kv_expansion{})"},
            kind="stat",
            width=4,
        ),
        Panel(
            title="Stall",
            help="Share of the steps' time in which compute waited for KV. Above 10 % the copies "
            "do not hide behind compute: the link is too slow for this expansion.",
            unit="percentunit",
            queries={"stall": _share("kv_stall_seconds_total", "kv_step_seconds_total")},
            kind="stat",
            width=4,
        ),
        Panel(
            title="Lost blocks / s",
            help="KV blocks that did not come back intact; their requests are computed anew. "
            "Anything but 0 is a fault of memory or disk: see Page errors.",
            unit="short",
            queries={"lost": _rate("kv_lost_blocks_total")},
            kind="stat",
            width=4,
        ),
    ),
    "KV cache": (
        Panel(
            title="Expansion and far layers",
            help="How much is swapped. Quick changes up and down: see the events in GET /tiered.",
            unit="none",
            queries={
                "expansion": "max(vllm:tiered_kv_expansion{})",
                "far layers": "max(vllm:tiered_kv_far_layers{})",
            },
        ),
        Panel(
            title="KV blocks",
            help="Blocks that requests may use, and blocks held back because more far layers would "
            "free them. Together with vLLM's usage: all released blocks in use means preemptions. "
            "Stored: content of evicted blocks in far memory. Kept: full blocks that are near in "
            "every layer, counted among the released.",
            unit="short",
            queries={"{{state}}": _sum("kv_blocks", " by (state) ")},
        ),
        Panel(
            title="KV copies",
            help="Bytes per second from far to near (read) and back (write).",
            unit="Bps",
            queries={"{{direction}}": _rate("kv_bytes_total", " by (direction) ")},
        ),
        Panel(
            title="Speed while copying",
            help="Bytes per second of copying time. Far below the probe's figure "
            "(`vllm-tiered probe`): the link is shared or throttled.",
            unit="Bps",
            queries={
                "{{direction}}": f"{_rate('kv_bytes_total', ' by (direction) ')} / "
                f"({_rate('kv_copy_seconds_total', ' by (direction) ')} > 0)"
            },
        ),
        Panel(
            title="Stall and bookkeeping",
            help="Shares of the steps' time: compute waited for KV; planning, translation, hooks.",
            unit="percentunit",
            queries={
                "stall": _share("kv_stall_seconds_total", "kv_step_seconds_total"),
                "bookkeeping": _share("kv_bookkeeping_seconds_total", "kv_step_seconds_total"),
            },
        ),
        Panel(
            title="Stall of a step",
            help="How long compute of a rank waited in one step: what the slowest tokens see.",
            unit="s",
            queries={
                "median": _quantile(0.5, "kv_step_stall_seconds"),
                "95 %": _quantile(0.95, "kv_step_stall_seconds"),
                "99 %": _quantile(0.99, "kv_step_stall_seconds"),
            },
        ),
        Panel(
            title="Memory by tier",
            help="Bytes of KV in near memory, far memory and files.",
            unit="bytes",
            queries={"{{tier}}": _sum("kv_memory_bytes", " by (tier) ")},
        ),
        Panel(
            title="Page errors",
            help="Far pages lost per second. checksum: bits changed. io, write: the disk reported "
            "an error or is full. late: it did not answer in time.",
            unit="short",
            queries={"{{reason}}": _rate("kv_page_errors_total", " by (reason) ")},
        ),
        Panel(
            title="Recomputed and preempted requests",
            help="Requests computed anew because a page was lost, and vLLM's preemptions.",
            unit="short",
            queries={
                "recomputed": _rate("kv_recomputed_requests_total"),
                "preempted": "sum(rate(vllm:num_preemptions_total{}[$__rate_interval]))",
            },
        ),
        Panel(
            title="Level changes",
            help="Changes of the number of far layers per second. A level that never settles "
            "costs copies.",
            unit="short",
            queries={"changes": _rate("kv_level_changes_total")},
        ),
    ),
    "Weights": (
        Panel(
            title="Far weights",
            help="Bytes per second of weights brought from far memory or storage.",
            unit="Bps",
            queries={"read": _rate("weights_read_bytes_total")},
        ),
        Panel(
            title="Waiting for weights",
            help="Seconds per second in which compute waited for far weights, all ranks. Near the "
            "number of ranks: the model is bound by the link; more near memory or larger batches "
            "help.",
            unit="none",
            queries={"waiting": _rate("weights_stall_seconds_total")},
        ),
    ),
    "Experts": (
        Panel(
            title="Experts found near",
            help="Share of the experts named by the router that were in a slot. Low with many "
            "requests or long prompts, which want nearly all; else raise experts.near_gib.",
            unit="percentunit",
            queries={
                "hits": f"{_rate('experts_hits_total')} / "
                f"({_rate('experts_hits_total')} + {_rate('experts_misses_total')} > 0)"
            },
        ),
        Panel(
            title="Experts loaded",
            help="Bytes per second, by where they came from.",
            unit="Bps",
            queries={"{{source}}": _rate("experts_loaded_bytes_total", " by (source) ")},
        ),
        Panel(
            title="Waiting for experts",
            help="Seconds per second in which compute waited for experts, all ranks. Near the "
            "number of ranks: the model is bound by the link or the disk.",
            unit="none",
            queries={"waiting": _rate("experts_wait_seconds_total")},
        ),
        Panel(
            title="Waves of a layer's step",
            help="Waves in which a layer's step computes its experts. 1 to 2: they fit the slots. "
            "More: a step wants more experts than there are slots.",
            unit="none",
            queries={
                "waves": f"{_rate('experts_waves_total')} / "
                f"({_rate('experts_layer_steps_total')} > 0)"
            },
        ),
        Panel(
            title="Experts read ahead",
            help="Share of the experts read ahead that the router then named. Nothing is shown "
            "where reading ahead is off, as where its trial found it slower.",
            unit="percentunit",
            queries={
                "used": f"{_rate('experts_ahead_used_total')} / "
                f"({_rate('experts_ahead_total')} > 0)"
            },
        ),
        Panel(
            title="Experts in 4 bit",
            help="Share of the pairs of a token and an expert that experts.fallback computed in 4 "
            "bit. More: fewer loads, and less exact.",
            unit="percentunit",
            queries={
                "in 4 bit": f"{_rate('experts_fallback_pairs_total')} / "
                f"({_rate('experts_pairs_total')} > 0)"
            },
        ),
    ),
    "Sparse FFN": (
        Panel(
            title="Neurons found near",
            help="Share of the neurons that sparse steps needed and found near. Below 0.8 the "
            "cache is too small for the working set: raise ffn.near_gib.",
            unit="percentunit",
            queries={
                "hits": f"{_rate('ffn_hits_total')} / "
                f"({_rate('ffn_hits_total')} + {_rate('ffn_misses_total')} > 0)"
            },
        ),
        Panel(
            title="Neurons loaded",
            help="Bytes per second, by where they came from, and the time compute waited for them.",
            unit="Bps",
            queries={"{{source}}": _rate("ffn_loaded_bytes_total", " by (source) ")},
        ),
        Panel(
            title="Layer steps",
            help="Layer steps with selected neurons and with all. Mostly dense: the predictor "
            "selects too many, or batches are large.",
            unit="short",
            queries={"{{kind}}": _rate("ffn_layer_steps_total", " by (kind) ")},
        ),
        Panel(
            title="Wait of a step",
            help="How long compute of a rank waited for neurons in one step.",
            unit="s",
            queries={
                "median": _quantile(0.5, "ffn_step_wait_seconds"),
                "99 %": _quantile(0.99, "ffn_step_wait_seconds"),
            },
        ),
    ),
    "L2 prefetch and energy": (
        Panel(
            title="Prefetched behind all-reduces",
            help="Bytes per second brought into the last-level cache, and those too late for it.",
            unit="Bps",
            queries={"{{outcome}}": _rate("l2_bytes_total", " by (outcome) ")},
        ),
        Panel(
            title="Power while steps run",
            help="Measured by RAPL and NVML, or assumed by constants where these cannot be read. "
            "Compare only figures of the same kind.",
            unit="watt",
            queries={
                "all": _rate("energy_joules_total"),
                "of it assumed": _rate("energy_assumed_joules_total"),
            },
        ),
        Panel(
            title="Joules per output token",
            help="With the parts of the machine that are measured or assumed (see Power).",
            unit="joule",
            queries={
                "J/token": f"{_rate('energy_joules_total')} / "
                "(sum(rate(vllm:generation_tokens_total{}[$__rate_interval])) > 0)"
            },
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "id": len(panels) + 1}
            | {"gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y}}
        )
        x, y = 0, y + 1
        height = 6 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y = 0, y + height
            where = {"h": height, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, len(panels) + 1, where))
            x += panel.width
        y += height
    return {
        "annotations": {"list": []},
        "description": "What vllm-tiered does: KV cache, weights and neurons over memory tiers.",
        "editable": True,
        "graphTooltip": 1,
        "links": [
            {
                "asDropdown": False,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "tags": ["vllm"],
                "targetBlank": False,
                "title": "vLLM dashboards",
                "tooltip": "",
                "type": "dashboards",
                "url": "",
            }
        ],
        "panels": panels,
        "refresh": "15s",
        "schemaVersion": 41,
        "tags": ["vllm"],
        "templating": {"list": [_datasource(), *(_variable(name) for name in VARIABLES)]},
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "title": "vLLM: tiered memory",
        "uid": "vllm-tiered",
    }


def _panel(panel: Panel, identity: int, where: dict[str, int]) -> dict[str, Any]:
    names = sorted(metric_names(list(panel.queries.values())))
    described = f"{panel.help}\n\nMetrics: {', '.join(f'`{name}`' for name in names)}"
    options: dict[str, Any] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    custom: dict[str, Any] = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
    if panel.kind == "stat":
        custom = {}
        options = {
            "colorMode": "none",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": panel.text,
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": described,
        "id": identity,
        "gridPos": where,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [
            {"expr": selected(query), "legendFormat": legend, "refId": chr(ord("A") + index)}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "noValue": "none", "custom": custom},
            "overrides": [],
        },
        "options": options,
    }


def selected(query: str) -> str:
    """Return a query that the dashboard's variables narrow down."""
    return query.replace("{}", f"{{{_SELECTED}}}")


def metric_names(queries: list[str]) -> set[str]:
    """Return the metrics that the queries name."""
    names: set[str] = set()
    for query in queries:
        for part in query.split("vllm:")[1:]:
            names.add("vllm:" + part.partition("{")[0])
    return names


def all_queries() -> list[str]:
    """Return the queries of all panels, with `{}` for the variables."""
    return [query for row in ROWS.values() for panel in row for query in panel.queries.values()]


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values(vllm:num_requests_running, {name})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the file is another")
    if parser.parse_args().check:
        return 0 if PATH.read_text(encoding="utf-8") == text() else 1
    PATH.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
