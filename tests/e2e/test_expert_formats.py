# SPDX-License-Identifier: Apache-2.0
"""Experts in each format become bundles and slots, also those whose kernels want AMX.

vLLM's kernels for them cannot run on every processor. So vLLM is told that there is AMX, loads the
model and makes the kernels' tensors, and the engine is stopped before its first step. What makes
those tensors is in vLLM's build for AVX-512 alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.offloader import get_offloader

from benchmarks.inputs.int4_settings import settings
from benchmarks.inputs.shapes import random_model_dir
from tests.e2e import harness
from tests.e2e.harness import AVX512, engine
from vllm_tiered.adapter.experts import engine as experts_engine
from vllm_tiered.adapter.experts.engine import ExpertsEngine
from vllm_tiered.adapter.experts.tensors import processed_tensors
from vllm_tiered.errors import UnsupportedError

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("mixtral", settings("gptq", 64)),
    "awq": ("mixtral", settings("awq", 64)),
    "compressed_int4": ("mixtral", settings("compressed", 64)),
    "compressed_int8": (
        "mixtral",
        {
            **settings("compressed", 64),
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                    "input_activations": {
                        "num_bits": 8,
                        "type": "int",
                        "strategy": "token",
                        "dynamic": True,
                    },
                }
            },
        },
    ),
    "fp8": (
        "mixtral",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["self_attn", "gate"],
        },
    ),
    "mxfp4": (
        "gpt_oss",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]},
    ),
}


class LoadedError(Exception):
    """The engine is stopped."""


@pytest.fixture(params=FORMATS)
def form(request, tmp_path: Path) -> str:
    shape, quantization = FORMATS[request.param]
    source = random_model_dir(shape)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in source.glob("*token*"):
        (tmp_path / path.name).symlink_to(path)
    harness.PATHS[request.param] = str(tmp_path)
    return str(request.param)


@pytest.fixture
def load(form, monkeypatch):
    """Returns the experts of an engine that has loaded its weights, and the kernel's tensors.

    It starts no step. The tensors are of all experts, by layer and name.
    """
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    engines: list[ExpertsEngine] = []
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    finish, close = ExpertsEngine.finish, ExpertsEngine.close

    def processed(layer: Any) -> dict[str, torch.Tensor]:
        found = processed_tensors(layer)
        tensors.setdefault(layer.layer_name, {name: t.clone() for name, t in found.items()})
        return found

    def finish_and_stop(experts: ExpertsEngine, model: torch.nn.Module) -> None:
        finish(experts, model)
        engines.append(experts)
        raise LoadedError

    def load(
        experts: dict[str, Any], **others: Any
    ) -> tuple[ExpertsEngine, dict[str, dict[str, torch.Tensor]]]:
        options: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "experts": experts}
        options |= others
        with pytest.raises(LoadedError), engine(form, {"enabled": False}, **options):
            pass
        return engines[0], tensors

    monkeypatch.setattr(experts_engine, "processed_tensors", processed)
    monkeypatch.setattr(ExpertsEngine, "finish", finish_and_stop)
    monkeypatch.setattr(ExpertsEngine, "close", lambda experts: None)
    yield load
    for experts in engines:
        close(experts)


@AVX512
@pytest.mark.parametrize("tier", ["far", "stored"])
def test_what_the_kernel_reads_is_in_the_slots(load, form, tmp_path: Path, tier: str) -> None:
    where = {"storage_path": str(tmp_path), "far_gib": 0} if tier == "stored" else {}
    if (form, tier) == ("compressed_int8", "stored"):
        with pytest.raises(UnsupportedError, match="rows that are not whole blocks"):
            load({"near_gib": 0.0015, **where})
        return
    experts, tensors = load({"near_gib": 0.0015, **where})
    assert len(tensors) == len(experts._layers) > 0
    for adopted in experts._layers:
        assert adopted.experts is not None and adopted.stored == (tier == "stored")
        layer = adopted.layer
        expected = tensors[layer.layer_name]
        seen: list[int] = []

        def check(x, weights, slots, layer=layer, expected=expected, seen=seen):
            assert len(expected) >= 4  # at least two matrices with their scales
            for expert, slot in zip(x[:, 0].int().tolist(), slots[:, 0].tolist(), strict=True):
                seen.append(expert)
                for name, of_all in expected.items():
                    slot_row = layer.get_parameter(name)[slot].view(torch.uint8)
                    assert torch.equal(slot_row, of_all[expert].view(torch.uint8)), name
            return torch.zeros_like(x)

        for wanted in ([0, 1], [7, 3], [0, 1, 2, 3, 4, 5, 6, 7]):
            ids = torch.tensor(wanted)[:, None]  # a token for each expert, whose input names it
            adopted.experts.compute(ids.float(), torch.ones(ids.shape), ids, check)
        assert set(seen) == set(range(8))


@AVX512
@pytest.mark.parametrize("form", ["mxfp4", "fp8"], indirect=True)
def test_attention_is_far_beside_experts_in_slots(load, monkeypatch) -> None:
    seen: list[tuple[set[str], int]] = []
    finish = ExpertsEngine.finish  # stops the engine

    def watched(experts: ExpertsEngine, model: torch.nn.Module) -> None:
        placed: Any = get_offloader()
        seen.append(({f"{one.path}.{one.leaf}" for one in placed._far}, placed.placement.far_bytes))
        finish(experts, model)

    monkeypatch.setattr(ExpertsEngine, "finish", watched)
    experts, tensors = load({"near_gib": 0.0015}, weights={"placement": "all_far"})
    ((names, far_bytes),) = seen
    assert {"qkv_proj.weight", "o_proj.weight"} == {
        ".".join(name.split(".")[-2:]) for name in names if name.endswith("weight")
    }
    assert not any("experts" in name for name in names)
    assert far_bytes > 0
    assert len(tensors) == len(experts._layers) > 0
    assert all(adopted.experts is not None for adopted in experts._layers)
