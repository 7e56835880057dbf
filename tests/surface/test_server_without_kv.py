# SPDX-License-Identifier: Apache-2.0
"""The metrics of a real `vllm serve` without the KV part, read from its workers at each scrape."""

import json
import shutil
import time

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.inputs.shapes import random_model_dir
from scripts import query_dashboard
from tests.e2e.harness import prepared
from tests.surface.servers import fetch, serving
from vllm_tiered.adapter.telemetry.figures import read_figures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# vLLM's connector carries histograms, and there is none. Nothing is read ahead of so few experts,
# and who streams all neurons hits none.
EMPTY = ("step_stall_seconds_bucket", "step_wait_seconds_bucket", "experts_ahead", "ffn_hits")


OPTIONS = (
    *("--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20), "--dtype", "float32"),
    *("--tiered-config.kv.enabled", "false"),
)


def generate(server: str) -> None:
    with OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        given = client.completions.create(
            model="demo", prompt="A list: one," * 5, max_tokens=12, extra_body={"ignore_eos": True}
        )
    assert given.usage is not None and given.usage.completion_tokens == 12


def figures(server: str) -> dict[str, float]:
    return read_figures(text_string_to_metric_families(fetch(f"{server}/metrics")[1]))


def check_metrics(server: str, parts: set[str]) -> None:
    """What the parts do is counted, and so is energy; what is off has no figures."""
    generate(server)
    time.sleep(1)  # scrapes in quick succession ask once
    before = figures(server)
    generate(server)
    time.sleep(1)
    after = figures(server)
    rising = {name.split("_")[0] for name in after if after[name] > before.get(name, 0.0)}
    assert parts | {"energy"} <= rising, rising
    assert not any(name.startswith("kv_") for name in after)
    text = fetch(f"{server}/metrics")[1]
    for part in ("kv", "weights", "experts", "ffn"):
        reason = "on" if part in parts else "off"
        assert f'part="{part}",reason="{reason}"}} 1.0' in text
    answer = json.loads(fetch(f"{server}/tiered")[1])
    assert answer["workers"][0]["energy"]["counters"]["energy_joules"] > 0
    check_dashboard(server, parts)


def check_dashboard(server: str, parts: set[str]) -> None:
    """Each query of the dashboard about a part at work has data in a real Prometheus."""
    if shutil.which("prometheus") is None:
        return
    with query_dashboard.prometheus(server) as url:
        for _ in range(6):
            generate(server)
            time.sleep(2)
        found = query_dashboard.run_queries(url)
    of_parts = {
        query: count
        for query, count in found.items()
        if any(f"tiered_{part}_" in query for part in parts | {"energy"})
        and not any(one in query for one in EMPTY)
    }
    assert len(of_parts) > len(parts)
    assert [query for query, count in of_parts.items() if not count] == []


def test_weights_and_experts(clean_env, tmp_path):
    arguments = ["--tiered-config.weights.placement", "all_far"]
    arguments += ["--tiered-config.experts.near_gib", "0.01"]
    model = random_model_dir("mixtral")
    log_path = tmp_path / "server.log"
    with serving(clean_env, str(model), log_path, *OPTIONS, *arguments) as (server, _):
        check_metrics(server, {"weights", "experts"})


def test_neurons(clean_env, tmp_path):
    model, store = random_model_dir("opt"), tmp_path / "store"
    prepared(model, store).close()
    arguments = ["--tiered-config.ffn.store", str(store), "--tiered-config.ffn.exact", "true"]
    arguments += ["--tiered-config.ffn.far_gib", "0"]
    log_path = tmp_path / "server.log"
    with serving(clean_env, str(model), log_path, *OPTIONS, *arguments) as (server, _):
        check_metrics(server, {"ffn"})
