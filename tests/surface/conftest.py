# SPDX-License-Identifier: Apache-2.0
"""A model folder, engine arguments made from it, and Python processes with a clean environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
