# SPDX-License-Identifier: Apache-2.0
"""Unchanged scripts whose engine and workers are other processes; a variable enables the plugin."""

from pathlib import Path

import pytest

from tests.e2e.harness import model_path, prepared, vllm_tokens
from tests.e2e.processes import OWN_PROCESS, PROMPTS, run_script


@pytest.mark.slow
def test_plugin_by_variable_and_engine_in_its_own_process(tmp_path) -> None:
    """The KV cache is swapped, and the FFN comes from a neuron store."""
    prepared(Path(model_path("deep-relu")), tmp_path / "store").close()
    config = tmp_path / "tiered.toml"
    config.write_text(
        "[kv]\nexpansion = 2.5\n"
        f"[ffn]\nstore = '{tmp_path / 'store'}'\nexact = true\nnear_gib = 0.01\nfar_gib = 0.003\n"
    )
    variables = OWN_PROCESS | {"VLLM_PLUGINS": "tiered", "VLLM_TIERED_CONFIG": str(config)}
    result = run_script(variables, model="deep-relu")
    assert result["tokens"] == vllm_tokens("deep-relu", PROMPTS, max_tokens=24)
    metrics = result["metrics"]
    assert metrics["vllm:tiered_kv_expansion"] == 2.5
    assert metrics["vllm:tiered_kv_bytes{read}"] > 0
    assert metrics["vllm:tiered_ffn_layer_steps{dense}"] > 0
    assert metrics["vllm:tiered_ffn_loaded_bytes{storage}"] > 0
    assert metrics["vllm:tiered_ffn_loaded_bytes{far}"] > 0


@pytest.mark.slow
def test_an_installed_plugin_that_is_off_changes_no_output() -> None:
    """Outputs equal, byte for byte, those of a process that does not even load the plugin.

    The engine runs in the script's own process. An engine elsewhere starts while requests still
    arrive, so its first batches, and with them the last bits of sums, depend on timing.
    """
    unloaded = run_script({"VLLM_PLUGINS": ""})
    off = run_script({})
    assert off["tokens"] == unloaded["tokens"]
    assert off["logprobs"] == unloaded["logprobs"]
    assert not any("tiered" in name for name in off["metrics"])
