# SPDX-License-Identifier: Apache-2.0
"""A real server, its engine and worker in processes of their own, switched on by its flags."""

import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

START_TIMEOUT_S = 500
NEAR_BYTES = 128 << 20


@pytest.fixture
def server(clean_env, model_dir, tmp_path):
    """The address of a server with half of its layers far; its log is shown if it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", model_dir, "--served-model-name", "demo", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", str(NEAR_BYTES)),
        *("--plugin", "tiered", "--tiered-config.kv.expansion", "2"),
        *("--tiered-config.kv.far_gib", "1"),
    ]
    # vLLM's own default: the engine in a process of its own.
    env = clean_env(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    log_path = tmp_path / "server.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
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


def fetch(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


@pytest.mark.timeout(700)
def test_the_flags_reach_the_worker_and_the_manifest_comes_back(server):
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

    body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8}
    completion = json.loads(fetch(f"{server}/v1/completions", body | {"temperature": 0}))
    assert completion["usage"]["completion_tokens"] == 8
    metrics = fetch(f"{server}/metrics").splitlines()
    (steps,) = [line for line in metrics if line.startswith("vllm:tiered_kv_steps_total{")]
    assert float(steps.split()[-1]) >= 8
