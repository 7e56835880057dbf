# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --plugin tiered`: the literal command, with processes of its own."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).with_name("vllm"))

START_TIMEOUT_S = 500
NEAR_BYTES = 128 << 20


@pytest.fixture
def log_path(tmp_path):
    return tmp_path / "server.log"


@pytest.fixture
def server(clean_env, model_dir, log_path):
    """The address of a server with half of its layers far; its log is shown if it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(COMMAND, "serve", model_dir, "--plugin", "tiered"),
        *("--served-model-name", "demo", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", str(NEAR_BYTES)),
        *("--tiered-config.kv.expansion", "2", "--tiered-config.kv.far_gib", "1"),
    ]
    # vLLM's own defaults: the engine in a process of its own, and a full log.
    env = clean_env(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="INFO")
    with log_path.open("w") as log:
        # In the root, where `triton_kernels` is importable.
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, address, log_path)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


def wait_until_up(process, address, log_path):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
        except OSError:  # refused, reset or too late
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server did not start:\n{log_path.read_text()[-8000:]}")


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


@pytest.mark.timeout(700)
def test_the_flags_reach_the_worker_and_the_manifest_comes_back(server, log_path):
    answer = json.loads(fetch(f"{server}/tiered"))
    assert answer["config"]["kv"]["expansion"] == 2
    (worker,) = answer["workers"]
    kv = worker["kv"]
    assert kv["active"] is True
    assert 0 < kv["far_layers"] < kv["num_layers"]
    # Logical capacity over what the near bytes hold alone.
    alone = kv["near_bytes"] // (kv["page_bytes"] * kv["num_layers"])
    assert kv["num_blocks"] + 1 > 1.5 * alone
    assert kv["near_bytes"] <= NEAR_BYTES
    assert 0 < kv["far_bytes"] <= 1 << 30

    with OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        completion = client.completions.create(
            model="demo", prompt="The capital of France is", max_tokens=8, temperature=0
        )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8
    metrics = fetch(f"{server}/metrics").splitlines()
    (steps,) = [line for line in metrics if line.startswith("vllm:tiered_kv_steps_total{")]
    assert float(steps.split()[-1]) >= 8
    check_log(log_path.read_text())


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
