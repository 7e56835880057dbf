# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs around far weights: pieces between the waits, or none, and a line that says so."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.config import set_current_vllm_config as current

from vllm_tiered.adapter.weights import graphs as weights_graphs
from vllm_tiered.config import WeightsConfig
from vllm_tiered.errors import IntegrityError
from vllm_tiered.weights.layout import sublayers_of
from vllm_tiered.weights.placement import place

FAR = WeightsConfig(placement="all_far")
STORED = WeightsConfig(placement="all_far", storage_path="/ssd")


def compiled(*, is_moe: bool = False, **changes: Any) -> Any:
    """As vLLM leaves its compilation configuration on a GPU, then changed."""
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    compilation.use_inductor_graph_partition = False
    compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = [1, 2, 4]
    compilation.max_cudagraph_capture_size = 4
    for name, value in changes.items():
        setattr(compilation, name, value)
    model_config = SimpleNamespace(is_moe=is_moe)
    return SimpleNamespace(compilation_config=compilation, model_config=model_config)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_graphs_are_cut_at_the_waits(mode, caplog):
    config = compiled(cudagraph_mode=CUDAGraphMode[mode])
    attention = list(config.compilation_config.splitting_ops)
    with caplog.at_level(logging.INFO, "vllm.tiered"):
        weights_graphs.partition_graphs(FAR, config)
    compilation = config.compilation_config
    assert compilation.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert compilation.splitting_ops == [*attention, "vllm::wait_prefetch", "vllm::start_prefetch"]
    assert compilation.cudagraph_capture_sizes == [1, 2, 4]
    assert f"PIECEWISE ({mode} without far weights)" in caplog.text
    weights_graphs.partition_graphs(FAR, config)
    assert len(compilation.splitting_ops) == len(attention) + 2


NONE: dict[str, tuple[WeightsConfig, dict[str, Any], str]] = {
    "stored": (STORED, {}, "leave weights.storage_path out"),
    "not compiled": (FAR, {"mode": CompilationMode.NONE}, "its mode is NONE"),
    "partitioned": (FAR, {"use_inductor_graph_partition": True}, "use_inductor_graph_partition"),
    "not split": (FAR, {"splitting_ops": []}, "splitting_ops leaves attention in the graphs"),
}


@pytest.mark.parametrize("case", NONE)
def test_what_cannot_be_cut_is_not_captured(case, caplog):
    weights, changes, why = NONE[case]
    config = compiled(**changes)
    weights_graphs.partition_graphs(weights, config)
    compilation = config.compilation_config
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE
    assert not compilation.cudagraph_capture_sizes and not compilation.max_cudagraph_capture_size
    assert why in caplog.text


@pytest.mark.parametrize("has_slots", [True, False])
def test_a_mixture_is_captured_around_slots_alone(has_slots, caplog):
    """Its shared experts wait within vLLM's op for it, which is split off only for slots."""
    config = compiled(is_moe=True)
    weights_graphs.partition_graphs(FAR, config, has_slots=has_slots)
    mode = config.compilation_config.cudagraph_mode
    assert mode == (CUDAGraphMode.PIECEWISE if has_slots else CUDAGraphMode.NONE)
    assert ("shared experts wait" in caplog.text) != has_slots


def test_breakable_graphs_are_not_captured(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    config = compiled()
    weights_graphs.partition_graphs(FAR, config)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" in caplog.text


def test_without_graphs_nothing_changes():
    config = compiled(cudagraph_mode=CUDAGraphMode.NONE)
    attention = list(config.compilation_config.splitting_ops)
    weights_graphs.partition_graphs(FAR, config)
    assert config.compilation_config.splitting_ops == attention


def test_a_wait_in_a_capture_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weights_graphs.check_not_captured()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(IntegrityError, match=r"captured around a wait .* --enforce-eager"):
        weights_graphs.check_not_captured()


def test_compiled_code_is_kept_by_the_placement():
    """One configuration may have two plans, as times are measured again."""
    names = ("self_attn.qkv_proj", "mlp.fc1", "mlp.fc2")
    sizes = {f"{name}.weight": 1 << 20 for name in names}
    sublayers = sublayers_of(0, sizes)
    keys = []
    for policy in ("all_far", "helm", "all_far"):
        config = VllmConfig(additional_config={"tiered": {}})
        with current(config):
            weights_graphs.remember_placement(place(policy, sublayers))
        keys.append(config.compute_hash())
    assert keys[0] == keys[2] != keys[1]
