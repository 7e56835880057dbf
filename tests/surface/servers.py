# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve MODEL --plugin tiered` in processes of its own, and questions to it."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).with_name("vllm"))

START_TIMEOUT_S = 500
NEAR_BYTES = 128 << 20
KEY = "a-key"


def serve(clean_env, model_dir, log_path, folder):
    """Serve with half of the layers' KV far, behind a key; see :func:`serving`."""
    return serving(
        clean_env,
        model_dir,
        log_path,
        *("--max-model-len", "512", "--kv-cache-memory-bytes", str(NEAR_BYTES)),
        *("--tiered-config.kv.expansion", "2", "--tiered-config.kv.far_gib", "1"),
        *("--tiered-config.report.path", str(folder / "timeline.jsonl"), "--api-key", KEY),
    )


@contextlib.contextmanager
def serving(clean_env, model_dir, log_path, *arguments):
    """Yield the address and the process of a server of the model `demo`, once it is up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(COMMAND, "serve", model_dir, "--plugin", "tiered"),
        *("--served-model-name", "demo", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *arguments,
    ]
    # vLLM's own defaults: the engine in a process of its own, and a full log.
    env = clean_env(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="INFO")
    with log_path.open("w") as log:
        # In the root, where `triton_kernels` is importable.
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, address, log_path)
        yield address, process
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


def fetch(url, key=None):
    """Return status and body of a GET."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=60
        ) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def state(server):
    """Return the answer of GET /tiered."""
    status, body = fetch(f"{server}/tiered", KEY)
    assert status == 200, body
    return json.loads(body)
