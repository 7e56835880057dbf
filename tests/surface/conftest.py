# SPDX-License-Identifier: Apache-2.0
"""A model folder, engine arguments made from it, clean Python processes, and a real browser."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def model_dir():
    from benchmarks.inputs.model import demo_model_dir

    return str(demo_model_dir())


@pytest.fixture
def make_engine_args(model_dir):
    """`make_engine_args(field=value, ...)`, with the plugin's hooks in place."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tiered.adapter import plugin

    plugin.register()
    return lambda **fields: EngineArgs(model=model_dir, enforce_eager=True, **fields)


@pytest.fixture(scope="session")
def clean_env():
    """`clean_env(NAME=value, ...)`: an environment for subprocesses, without warnings as errors.

    They find the same vLLM as this process, an overlay as well.
    """
    search_path = [str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]]
    base = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    base["PYTHONPATH"] = os.pathsep.join(search_path)
    return lambda **extra: base | extra


@pytest.fixture(scope="session")
def run_python(clean_env):
    """Run this interpreter with the arguments in a clean environment; stdout of a success."""

    def run(*arguments, **extra):
        done = subprocess.run(
            [sys.executable, *arguments],
            env=clean_env(**extra),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def run_probe(run_python, model_dir):
    """Run probe.py with flags, in an environment; its answer."""

    def run(*flags, **extra):
        out = run_python(str(Path(__file__).with_name("probe.py")), model_dir, *flags, **extra)
        return json.loads(out.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """`opened(url, **options)`: the page in a window of its own, which must not log an error."""
    with contextlib.ExitStack() as windows:

        def open_page(url, *, may_fail=(), **options):
            options = {"viewport": {"width": 1280, "height": 900}} | options
            window = windows.enter_context(browser.new_context(**options))
            tab = window.new_page()
            tab.set_default_timeout(20_000)
            errors, requests = [], []
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.on(
                "console",
                lambda said: errors.append(said.text) if said.type == "error" else None,
            )
            tab.on("request", lambda request: requests.append(request.url))

            def check():
                unexpected = [e for e in errors if not any(known in e for known in may_fail)]
                assert unexpected == []
                assert {u for u in requests if not u.startswith(("data:", "blob:"))} == {url}

            windows.callback(check)
            tab.goto(url)
            return tab

        yield open_page
