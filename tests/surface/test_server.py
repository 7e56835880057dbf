# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --plugin tiered`: the literal command, with processes of its own."""

import json
import os
import re
import shutil
import signal
import time
from collections import Counter

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from scripts import query_dashboard
from tests.surface.servers import KEY, NEAR_BYTES, ROOT, fetch, serve, state
from vllm_tiered.adapter.compat import vllm_version
from vllm_tiered.adapter.telemetry.figures import read_figures
from vllm_tiered.cli.live_rates import PARTS


@pytest.fixture
def log_path(tmp_path):
    return tmp_path / "server.log"


@pytest.fixture
def server(clean_env, model_dir, log_path, tmp_path):
    """The address of a server with half of its layers far; its log is shown if it fails."""
    with serve(clean_env, model_dir, log_path, tmp_path) as (address, _):
        yield address


def metric(server, name):
    """Return a figure as /metrics has it, which is open to all in vLLM."""
    families = text_string_to_metric_families(fetch(f"{server}/metrics")[1])
    return read_figures(families)[name]


@pytest.mark.timeout(700)
def test_the_flags_reach_the_worker_and_the_manifest_comes_back(server, log_path):
    assert json.loads(fetch(f"{server}/version")[1]) == {"version": vllm_version()}  # an overlay's
    assert fetch(f"{server}/tiered") == fetch(f"{server}/v1/models")
    assert fetch(f"{server}/tiered", "wrong") == (401, '{"error":"Unauthorized"}')
    answer = state(server)
    assert answer["config"]["kv"]["expansion"] == 2
    assert answer["config"]["report"]["path"].endswith("timeline.jsonl")
    (worker,) = answer["workers"]
    kv = worker["kv"]
    assert (kv["state"], kv["active"]) == ("on", True)
    assert (worker["weights"]["state"], worker["ffn"]["state"]) == ("off", "off")
    assert worker["l2"]["state"] == "stepped aside" and "rank" in worker["l2"]["reason"]
    assert kv["counters"].get("kv_steps", 0) == 0
    # Gauges are set before the first step.
    assert metric(server, "kv_expansion") == pytest.approx(kv["expansion"])
    assert metric(server, "kv_near_bytes") == kv["near_bytes"]
    assert metric(server, "kv_far_bytes") == kv["far_bytes"]
    assert metric(server, "kv_blocks_released") == kv["num_blocks"]
    assert 0 < kv["far_layers"] < kv["num_layers"]
    # Logical capacity over what the near bytes hold alone.
    alone = kv["near_bytes"] // (kv["page_bytes"] * kv["num_layers"])
    assert kv["num_blocks"] + 1 > 1.5 * alone
    assert kv["near_bytes"] <= NEAR_BYTES
    assert 0 < kv["far_bytes"] <= 1 << 30

    with OpenAI(base_url=f"{server}/v1", api_key=KEY) as client:
        completion = client.completions.create(
            model="demo", prompt="The capital of France is", max_tokens=8, temperature=0
        )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8
    assert metric(server, "kv_steps") >= 8
    answer = state(server)
    (engine,) = answer["engines"]
    counters = answer["workers"][0]["kv"]["counters"]
    assert counters["kv_steps"] == metric(server, "kv_steps")
    assert counters["kv_step_seconds"] == pytest.approx(metric(server, "kv_step_seconds"))
    assert engine["kv_blocks_released"] == metric(server, "kv_blocks_released")
    check_dashboard(server)
    check_log(log_path.read_text())
    check_hanging_worker(server, worker["pid"])


def check_dashboard(server):
    """Run the dashboard's queries in a real Prometheus; those of parts at work have data."""
    if shutil.which("prometheus") is None:
        return
    idle = ("weights", "experts", "ffn", "l2", "energy", "kv_page_errors")
    with query_dashboard.prometheus(server) as url:
        for _ in range(4):  # on a busy machine the scrapes of one turn may not be enough for a rate
            for _ in range(5):
                with OpenAI(base_url=f"{server}/v1", api_key=KEY) as client:
                    client.completions.create(
                        model="demo", prompt="A list: one," * 50, max_tokens=48
                    )
                time.sleep(1)
            found = query_dashboard.run_queries(url)
            empty = {query for query, count in found.items() if not count}
            empty = {one for one in empty if not any(f"tiered_{part}" in one for part in idle)}
            if not empty:
                break
    assert not empty
    assert found["max by (part, reason) (vllm:tiered_part_active{} == 1)"] == len(PARTS)


def check_hanging_worker(server, pid):
    """Stop the worker's process: the answer comes in time and names it; then let it go on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        status, body = fetch(f"{server}/tiered", KEY)
        assert time.monotonic() - begin < 15
        assert status == 503
        assert f"worker rank 0 (pid {pid}) is stopped" in json.loads(body)["error"]
        assert json.loads(body)["workers"][0]["kv"]["state"] == "on"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert state(server)["workers"][0]["pid"] == pid
    with OpenAI(base_url=f"{server}/v1", api_key=KEY) as client:
        assert client.completions.create(model="demo", prompt="Two and", max_tokens=4).choices


def check_log(log):
    """Fail on tracebacks, warnings of ours or about us, and a subsystem with more than one line."""
    assert "Traceback" not in log
    # The repository's own path does not count as a mention of the plugin.
    lines = log.replace(str(ROOT), "").splitlines()
    alarming = re.compile(r"(WARNING|ERROR|CRITICAL) .*(tiered|triton_kernels)")
    assert [line for line in lines if alarming.search(line)] == []
    said = Counter(re.findall(r"^\(.*\] (tiered[ \w]*):", log, flags=re.MULTILINE))
    assert {"tiered", "tiered kv", "tiered l2"} <= said.keys()
    assert set(said.values()) == {1}, said
