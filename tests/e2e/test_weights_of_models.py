# SPDX-License-Identifier: Apache-2.0
"""Weights of mixtures, latent attention, hybrids and other kinds of models in far memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models import opt
from vllm.model_executor.offloader import get_offloader

from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.shapes import write_model
from tests.e2e.harness import (
    PATHS,
    Tokens,
    engine,
    generate,
    model_path,
    random_prompts,
    run,
    vllm_tokens,
)
from tests.e2e.test_options import write_adapter
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.adapter.weights import layer_weights, offloader
from vllm_tiered.adapter.weights.layer_weights import movable_parameters
from vllm_tiered.errors import UnsupportedError

PROMPTS = random_prompts(6, seed=5)
KV_OFF = {"enabled": False}
ALL_FAR = {"placement": "all_far"}
FAR_OF = {
    "qwen3_moe": {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"},
    "glm4_moe": {"mlp.shared_experts.down_proj.weight", "mlp.gate_up_proj.weight"},
    "deepseek_v2": {"self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"},
    "granite_hybrid": {"mamba.in_proj.weight", "self_attn.o_proj.weight"},
    "lfm2": {"short_conv.in_proj.weight", "feed_forward.w2.weight"},
    "nemotron_h": {"mixer.out_proj.weight", "mixer.qkv_proj.weight"},
    "qwen3_next": {"linear_attn.out_proj.weight", "self_attn.o_proj.weight"},
    "gpt_oss": {"attn.qkv_proj.weight", "attn.o_proj.weight"},
}
"""Some of the parameters that are far, by model."""

NEAR_WORDS = ("kv_b_proj", "conv1d", "conv.conv", "mlp.gate.", "experts.w", "dt_", "A", "D")
"""Parts of names that no far parameter has: other modules read them."""


MAMBA: dict[str, Any] = {
    "model_type": "mamba2",
    "hidden_size": 256,
    "num_heads": 8,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 1,
    "chunk_size": 64,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the name of a model without attention."""
    folder = tmp_path_factory.mktemp("mamba2")
    write_model(MAMBA, 49152, 0, folder)
    for path in demo_model_dir().glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    PATHS["mamba2"] = str(folder)
    return "mamba2"


@pytest.fixture
def delayed(monkeypatch):
    """Delay copies, and fill weight buffers with NaN before each."""
    monkeypatch.setattr(offloader, "make_device", lambda: DelayedDevice(3, 0.002))


def far_names() -> set[str]:
    placement = get_offloader().placement
    return {parameter.name for far in placement.far for parameter in far}


DTYPES = {"qwen3_next": "bfloat16"}
"""Where vLLM's kernels for a CPU are not for float32."""


def expected_of(model: str) -> list[list[int]]:
    """Return vLLM's tokens in float32; in 16 bit those with the plugin and all weights near.

    With the plugin the head is not packed on the CPU, which rounds otherwise in 16 bit.
    """
    if model not in DTYPES:
        return vllm_tokens(model, PROMPTS)
    near = {"placement": "flexgen", "percents": [100, 0, 0]}
    return run(model, PROMPTS, KV_OFF, weights=near, dtype=DTYPES[model]).tokens


def dtype_of(model: str) -> dict[str, Any]:
    return {"dtype": DTYPES[model]} if model in DTYPES else {}


@pytest.mark.parametrize("model", FAR_OF)
def test_tokens_equal_with_delayed_and_poisoned_copies(model, delayed) -> None:
    expected = expected_of(model)
    with engine(model, KV_OFF, weights=ALL_FAR, **dtype_of(model)) as llm:
        assert generate(llm, PROMPTS) == expected
        assert get_offloader().is_checked
        assert far_names() >= FAR_OF[model]
        assert not [name for name in far_names() for word in NEAR_WORDS if word in name]
        assert get_offloader().buffer_pool.num_misses == 0, "the order of the layers is kept"
        get_offloader().buffer_pool.check_integrity()


def test_a_model_without_attention(mamba, delayed) -> None:
    expected = vllm_tokens(mamba, PROMPTS)
    with engine(mamba, KV_OFF, weights=ALL_FAR) as llm:
        assert generate(llm, PROMPTS) == expected
        assert far_names() == {"mixer.in_proj.weight", "mixer.out_proj.weight"}


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("glm4_moe", {"placement": "helm"}),
        ("granite_hybrid", {"placement": "latency", "near_gib": 0.012}),
        ("deepseek_v2", {"placement": "throughput", "near_gib": 0.2}),
    ],
)
def test_other_placements(model, weights) -> None:
    expected = vllm_tokens(model, PROMPTS)
    options: dict[str, Any] = {}
    if weights["placement"] == "throughput":
        options["kv_cache_memory_bytes"] = None
    result = run(model, PROMPTS, KV_OFF, weights=weights, **options)
    assert result.tokens == expected
    stated = result.manifest["weights"]
    assert stated["placement"] == weights["placement"]
    if "near_gib" in weights:
        assert stated["near_bytes"] + stated["buffer_bytes"] <= weights["near_gib"] * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("model", FAR_OF)
def test_each_kind_in_each_placement_and_from_a_file(model, tmp_path) -> None:
    expected = expected_of(model)
    stored = {**ALL_FAR, "storage_path": str(tmp_path), "far_gib": 0}
    latency = {"placement": "latency", "near_gib": 0.03 if model == "gpt_oss" else 0.02}
    for weights in ({"placement": "helm"}, latency, stored):
        result = run(model, PROMPTS, KV_OFF, weights=weights, **dtype_of(model))
        assert result.tokens == expected, weights
        assert result.manifest["weights"]["placement"] == weights["placement"]
    assert result.manifest["weights"]["storage_bytes"] > 0


def absorbed(llm: Any) -> list[torch.Tensor]:
    """Return what attention over latents has made of weights, by layer."""

    def find(model: torch.nn.Module) -> list[torch.Tensor]:
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "W_UV")]
        return [module.W_UV.clone() for module in modules]

    (found,) = llm.apply_model(find)
    assert isinstance(found, list) and len(found) == 3
    return found


def from_a_file(folder: Path) -> tuple[Tokens, bool]:
    """Return the tokens of a later start, and whether it absorbs what the first start did."""
    weights = {**ALL_FAR, "storage_path": str(folder), "far_gib": 0}
    with engine("deepseek_v2", KV_OFF, weights=weights) as llm:
        first = absorbed(llm)
    with engine("deepseek_v2", KV_OFF, weights=weights) as llm:
        assert (manifest.current() or {})["weights"]["storage_bytes"] > 0
        tokens, second = generate(llm, PROMPTS), absorbed(llm)
    return tokens, all(map(torch.equal, first, second))


def test_latent_attention_from_a_file(tmp_path: Path) -> None:
    """Later starts read the file, and what attention absorbs comes from the checkpoint."""
    expected = vllm_tokens("deepseek_v2", PROMPTS)
    assert from_a_file(tmp_path) == (expected, True)


def test_without_the_rule_attention_absorbs_other_bytes(monkeypatch, tmp_path) -> None:
    """With a filled file, a far weight is a view of a weight buffer from the beginning."""
    monkeypatch.setattr(layer_weights, "_read_elsewhere", lambda layer: ())
    _, is_same = from_a_file(tmp_path)
    assert not is_same


# Together with experts in slots ---------------------------------------------------------


def test_experts_in_slots_have_a_budget_of_their_own() -> None:
    """Neither part counts what the other one keeps."""
    expected = vllm_tokens("glm4_moe", PROMPTS)
    expert_bytes = 3 * 128 * 256 * 4
    experts = {"near_gib": 5.1 * 2 * expert_bytes / 2**30}
    weights = {**ALL_FAR, "near_gib": 0.005}
    result = run("glm4_moe", PROMPTS, KV_OFF, weights=weights, experts=experts)
    assert result.tokens == expected
    stated = result.manifest["weights"]
    assert stated["near_bytes"] + stated["buffer_bytes"] < 0.005 * 2**30 < 16 * 2 * expert_bytes
    assert result.manifest["experts"]["slots"] == 5


def test_both_in_files(tmp_path: Path) -> None:
    expected = vllm_tokens("glm4_moe", PROMPTS)
    folders = [tmp_path / name for name in ("weights", "experts")]
    weights = {**ALL_FAR, "storage_path": str(folders[0]), "far_gib": 0}
    experts = {"near_gib": 0.005, "storage_path": str(folders[1]), "far_gib": 0}
    for folder in folders:
        folder.mkdir()
    for _ in range(2):
        result = run("glm4_moe", PROMPTS, KV_OFF, weights=weights, experts=experts)
        assert result.tokens == expected
        assert result.manifest["weights"]["storage_bytes"] > 0
        assert result.manifest["experts"]["storage_bytes"] > 0


# Drafts, adapters, other code -----------------------------------------------------------

OTHERS = ("helm", "latency", "stored")


@pytest.fixture(params=["all_far", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def weights(request, tmp_path) -> dict[str, Any]:
    """Each placement; `stored` is all far, and in a file."""
    if request.param == "stored":
        return {**ALL_FAR, "storage_path": str(tmp_path), "far_gib": 0}
    near = {"near_gib": 0.005} if request.param == "latency" else {}
    return {"placement": request.param, **near}


def check_offloaded(weights: dict[str, Any]) -> None:
    stated = (manifest.current() or {})["weights"]
    assert stated["placement"] == weights["placement"]
    assert stated["storage_bytes" if "storage_path" in weights else "far_bytes"] > 0
    assert get_offloader().buffer_pool.num_misses == 0
    get_offloader().buffer_pool.check_integrity()


def test_a_draft_models_layers_stay_near(delayed, weights) -> None:
    expected = vllm_tokens("llama3", PROMPTS)
    speculation = {
        "method": "draft_model",
        "model": model_path("qwen2"),
        "num_speculative_tokens": 3,
    }
    with engine("llama3", KV_OFF, weights=weights, speculative_config=speculation) as llm:
        assert generate(llm, PROMPTS) == expected
        placement = get_offloader().placement
        assert {sublayer.layer for sublayer in placement.sublayers} == {0, 1, 2}
        check_offloaded(weights)


def test_adapters_wait_for_the_weights_below_them(delayed, weights, tmp_path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", 1)))
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    def drive(llm: LLM) -> Tokens:
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(requests, sampling, use_tqdm=False, lora_request=adapter)
        return [list(output.outputs[0].token_ids) for output in outputs]

    options: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    expected = run("qwen2", PROMPTS, drive=drive, **options).tokens
    assert expected != vllm_tokens("qwen2", PROMPTS)
    with engine("qwen2", KV_OFF, weights=weights, **options) as llm:
        assert drive(llm) == expected
        check_offloaded(weights)


def test_the_transformers_backend(delayed, weights, monkeypatch) -> None:
    # For its compiler, vLLM changes a class of transformers, which later tests use.
    compiles = "vllm.model_executor.models.transformers.base.support_torch_compile"
    monkeypatch.setattr(compiles, lambda **_: lambda cls: cls)
    expected = run("qwen2", PROMPTS, model_impl="transformers").tokens
    with engine("qwen2", KV_OFF, weights=weights, model_impl="transformers") as llm:
        assert generate(llm, PROMPTS) == expected
        check_offloaded(weights)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm4_moe", "granite_hybrid"])
def test_compiled(model) -> None:
    expected = vllm_tokens(model, PROMPTS)
    with engine(model, KV_OFF, weights=ALL_FAR, enforce_eager=False) as llm:
        assert generate(llm, PROMPTS) == expected
        assert get_offloader().is_checked
        assert get_offloader().buffer_pool.num_misses < 10, "the order of the layers is kept"


# Reads outside of a module's call -------------------------------------------------------


def let_attention_read_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let OPT multiply with a weight that it prepares itself, as a fused kernel would."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight, bias = self.out_proj.weight + 0, self.out_proj.bias + 0
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.chunk(chunks=3, dim=-1)
        return torch.nn.functional.linear(self.attn(q, k, v), weight, bias)

    monkeypatch.setattr(opt.OPTAttention, "forward", forward)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_weight_that_is_read_elsewhere_is_refused(eager, monkeypatch) -> None:
    let_attention_read_a_weight(monkeypatch)
    with (
        pytest.raises(UnsupportedError, match=r"reads self_attn\.out_proj\.weight, .* outside"),
        engine("opt", KV_OFF, weights=ALL_FAR, enforce_eager=eager),
    ):
        pytest.fail("the engine started")


def test_without_the_check_it_computes_with_other_bytes(delayed, monkeypatch) -> None:
    """What the check protects: nothing fails, and the tokens differ."""
    expected = vllm_tokens("opt", PROMPTS)
    let_attention_read_a_weight(monkeypatch)
    monkeypatch.setattr(offloader, "check_reads", lambda *args: None)
    with engine("opt", KV_OFF, weights=ALL_FAR) as llm:
        assert generate(llm, PROMPTS) != expected


def test_shared_parameters_stay_near_and_count_once() -> None:
    fc1, first, second = torch.nn.Linear(64, 64), torch.nn.Module(), torch.nn.Module()
    for layer in (first, second):
        layer.fc1, layer.fc2 = fc1, torch.nn.Linear(64, 64)
    shared = layer_weights.shared_parameters([first, second])
    assert shared == {id(fc1.weight), id(fc1.bias)}


def test_gates_and_what_mixtures_hold_stay_near() -> None:
    layer, runner = torch.nn.Module(), torch.nn.Module()
    config = SimpleNamespace(num_logical_experts=8, hidden_dim=64)
    layer.gate, layer.up = torch.nn.Linear(64, 8), torch.nn.Linear(64, 32)
    layer.scale = torch.nn.Linear(64, 1)
    layer.runner, runner.scale = runner, layer.scale
    vars(runner)["moe_config"] = config
    assert movable_parameters(layer) == {"up.weight", "up.bias"}
