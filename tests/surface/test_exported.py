# SPDX-License-Identifier: Apache-2.0
"""The frozen names: entry points, command, flags' values, and imports without side effects."""

import importlib.metadata
import subprocess
import sys

import pytest

from vllm_tiered.adapter import (
    cli_args,
    compat,
    connector_name,
    engine_config,
    platform_plugin,
    plugin,
)
from vllm_tiered.adapter.telemetry import endpoint
from vllm_tiered.cli.main import main


@pytest.mark.parametrize(
    ("group", "name", "target"),
    [
        ("vllm.general_plugins", "tiered", plugin.register),
        ("vllm.platform_plugins", "tiered", platform_plugin.register),
        ("vllm.endpoint_plugins", "tiered", endpoint.make_endpoint_plugin),
        ("console_scripts", "vllm-tiered", main),
    ],
)
def test_entry_points(group, name, target):
    (found,) = importlib.metadata.entry_points(group=group, name=name)
    assert found.load() is target


def test_names_other_parts_and_users_rely_on():
    assert compat.SUPPORTED_VLLM == ("0.32", "0.33")
    assert cli_args.PLUGIN_NAMES == ("tiered",)
    assert engine_config.CONFIG_FILE_VARIABLE == "VLLM_TIERED_CONFIG"
    assert (connector_name.CONNECTOR_MODULE, connector_name.CONNECTOR) == (
        "vllm_tiered.adapter.kv.connector",
        "TieredConnector",
    )
    assert endpoint.PATH == "/tiered"


@pytest.mark.parametrize(
    "module",
    [
        "vllm_tiered.adapter.plugin",
        "vllm_tiered.adapter.platform_plugin",
        "vllm_tiered.adapter.distribution",
        "vllm_tiered.adapter.compat",
        "vllm_tiered.cli.main",
    ],
)
def test_importing_does_not_import_vllm(module):
    code = f"import sys, {module}; assert 'vllm' not in sys.modules, sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_entry_module_imports_nothing_at_its_top():
    code = (
        "import sys; before = set(sys.modules); import vllm_tiered.adapter.plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    ours = {"vllm_tiered", "vllm_tiered.adapter", "vllm_tiered.adapter.plugin"}
    assert set(done.stdout.split()) <= ours
