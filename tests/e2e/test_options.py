# SPDX-License-Identifier: Apache-2.0
"""vLLM's options beside KV swapping: each gives vLLM's own outputs, with far layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.harness import AVX512, PATHS, engine, metric, model_path, random_prompts

MIB = 1 << 20
PROMPTS = random_prompts(10, longest=150)
TIGHT: dict[str, Any] = {"max_model_len": 320, "max_num_batched_tokens": 96}

Generate = Callable[[Any], Any]


def both(
    model: str, drive: Generate, *, near: int, expansion: float = 1.2, **options: Any
) -> tuple[Any, Any]:
    """Return what ``drive`` gives with vLLM and ample memory, and with far layers and little."""
    with engine(model, None, **options) as llm:
        expected = drive(llm)
    little = {"kv_cache_memory_bytes": near, **TIGHT}
    with engine(model, {"expansion": expansion}, **(options | little)) as llm:
        result = drive(llm)
        assert metric("tiered_kv_read_bytes") > 0
        assert metric("num_preemptions") > 0
    return result, expected


def completions(llm: Any, prompts: Any = PROMPTS, lora: Any = None, **sampling: Any) -> Any:
    """Return tokens and logprobs of every completion of every prompt."""
    from vllm import SamplingParams

    defaults = {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True}
    params = SamplingParams(**(defaults | sampling))
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False, lora_request=lora)
    return [
        (
            [tuple(one.token_ids) for one in output.outputs],
            [[*(at or {})] for at in output.prompt_logprobs or ()],
        )
        for output in outputs
    ]


def test_several_completions_of_a_prompt() -> None:
    def drive(llm: Any) -> Any:
        # Greedy: vLLM's random numbers depend on the batch, and its CPU backend takes no seeds.
        return completions(llm, n=3, temperature=1.0, top_k=1)

    result, expected = both("qwen2", drive, near=5 * MIB, enable_prefix_caching=True)
    assert result == expected
    assert {len(tokens) for tokens, _ in expected} == {3}


def test_logprobs_of_prompts() -> None:
    def drive(llm: Any) -> Any:
        return completions(llm, prompt_logprobs=2, logprobs=2)

    result, expected = both("qwen2", drive, near=4 * MIB)
    assert result == expected
    assert [len(logprobs) for _, logprobs in expected] == [len(prompt) for prompt in PROMPTS]


def test_structured_output() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 15}},
        "required": ["names"],
    }
    params = SamplingParams(
        temperature=0.0, max_tokens=120, structured_outputs=StructuredOutputsParams(json=schema)
    )
    prompts = [f"List the names of {count} animals as JSON:" for count in range(3, 15)]

    def drive(llm: Any) -> list[str]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    options: dict[str, Any] = {"skip_tokenizer_init": False}
    result, expected = both("demo", drive, near=24 * MIB, expansion=1.5, **options)
    assert result == expected
    assert all(text.lstrip().startswith("{") for text in expected)


@AVX512
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_kv_in_8_bit(dtype) -> None:
    result, expected = both("qwen2", completions, near=MIB, kv_cache_dtype=dtype)
    assert result == expected


def test_quantised_weights(tmp_path) -> None:
    """In 8 bit, as compressed-tensors writes them."""
    source = Path(model_path("qwen2"))
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights.pop(name).float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel"},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    PATHS["int8"] = str(tmp_path)
    result, expected = both("int8", completions, near=2 * MIB, dtype="bfloat16")
    assert result == expected


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter that adds random matrices to the queries and values of ``qwen2``."""
    folder.mkdir()
    config = json.loads(Path(model_path("qwen2"), "config.json").read_text())
    hidden, kv = config["hidden_size"], config["num_key_value_heads"] * 64
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in (("q_proj", hidden), ("v_proj", kv)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (8, hidden), "lora_B": (width, 8)}
            for part, shape in shapes.items():
                tensors[f"{key}.{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_two_adapters(tmp_path) -> None:
    """Every request has one: vLLM's CPU backend alone adds the last one to a batch without any."""
    from vllm.lora.request import LoRARequest

    first, second = (
        LoRARequest(str(at), at, str(write_adapter(tmp_path / str(at), at))) for at in (1, 2)
    )

    def drive(llm: Any) -> Any:
        return completions(llm, lora=[first, second] * 5)

    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    options |= {"enable_prefix_caching": True}
    result, expected = both("qwen2", drive, near=4 * MIB, **options)
    assert result == expected
    with engine("qwen2", None, **options) as llm:
        swapped = completions(llm, lora=[second, first] * 5)
    assert not any(a == b for a, b in zip(swapped, expected, strict=True))
