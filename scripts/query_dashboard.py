# SPDX-License-Identifier: Apache-2.0
"""Runs every query of the dashboard in a real Prometheus that scrapes a running server.

Usage: python -m scripts.query_dashboard http://localhost:8000 [SECONDS]

Needs the program `prometheus`. Prints each query with the number of series that it returned.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts import dashboard

INTERVAL = "1m"
"""Stands for Grafana's $__rate_interval."""

# A scrape takes as long as `scrape.PATIENCE_S` (2 s) while a step is longer than that.
_CONFIG = """
global: {{scrape_interval: 3s, scrape_timeout: 3s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["{target}"]}}]
"""


@contextmanager
def prometheus(server: str) -> Iterator[str]:
    """Yield the URL of a Prometheus that scrapes `server`, with the project's alerts.

    Raises:
        RuntimeError: it ended.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("the program prometheus is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    rules = dashboard.PATH.with_name("vllm_tiered.rules.yml")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        target = urllib.parse.urlsplit(server).netloc
        config.write_text(_CONFIG.format(rules=rules, target=target), encoding="utf-8")
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        with subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL
        ) as process:
            try:
                _wait_ready(f"http://{address}/-/ready", process)
                yield f"http://{address}"
            finally:
                process.terminate()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if process.poll() is not None:
            raise RuntimeError(f"prometheus ended with status {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError("prometheus did not start within 30 s")


def run_queries(url: str) -> dict[str, int]:
    """Return the number of series that each query of the dashboard returns.

    Raises:
        RuntimeError: the server was not scraped, so that no query can have data.
        urllib.error.HTTPError: a query is wrong.
    """
    if not _num_series(url, "up == 1"):
        raise RuntimeError("Prometheus could not scrape the server; its targets page says why")
    found = {}
    for query in dashboard.all_queries():
        text = dashboard.selected(query).replace("$__rate_interval", INTERVAL)
        for name in dashboard.VARIABLES:
            text = text.replace(f'"${name}"', '".*"')  # Grafana's "All"
        found[query] = _num_series(url, text)
    return found


def _num_series(url: str, query: str) -> int:
    asked = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(asked, timeout=30) as answer:
        result = json.load(answer)["data"]["result"]
    return sum(series["value"][1] != "NaN" for series in result)  # NaN: a quantile of no samples


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Prometheus ends with this process
    server, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    with prometheus(server) as url:
        time.sleep(seconds)
        for query, count in run_queries(url).items():
            print(f"{count:3}  {query}")


if __name__ == "__main__":
    main()
