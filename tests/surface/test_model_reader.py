# SPDX-License-Identifier: Apache-2.0
"""Sizes of published models, from vLLM's own classes, against published numbers."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.inputs.coder_model import coder_model_dir
from benchmarks.inputs.model import demo_model_dir, gemma_model_dir
from benchmarks.inputs.quantized_checkpoint import quantized_model_dir
from tests.fixtures.real_models import NESTED, REAL_MODELS
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.planner import built_model
from vllm_tiered.planner.built_model import shape_of
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.model_shape import bytes_by_class
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import Batch, predict_step
from vllm_tiered.weights.placement import place

FEW = (
    "SmolLM2-135M",
    "Llama-3.3-70B-AWQ",
    "Gemma-3-27B",
    "Qwen3-30B-A3B",
    "gpt-oss-120b",
    "DeepSeek-V2-Lite",
)


_READER = """
import sys
from vllm.model_executor.models import registry
from benchmarks.suites.support.families import StandIns
from vllm_tiered.adapter.model_reader import main
StandIns.roots = ("torchvision",)  # which vision towers import
sys.meta_path.append(StandIns())
registry._run_in_subprocess = lambda inspect: inspect()
sys.exit(main(sys.argv[1:]))
"""


def read(folder, names, *, dtype="auto", ranks=1, configs=None, stands_in=False):
    """Return the shapes of models by name, all read in one process."""
    configs = configs or {name: model.config for name, model in REAL_MODELS.items()}
    models = []
    for name in names:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(configs[name]))
        models.append(str(folder / name))
    program = ("-c", _READER) if stands_in else ("-m", "vllm_tiered.adapter.model_reader")
    done = subprocess.run(
        [sys.executable, *program, dtype, str(ranks), *models],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0"},
    )
    prefix = built_model.PREFIX
    lines = [line for line in done.stdout.splitlines() if line.startswith(prefix)]
    answers = [json.loads(line.removeprefix(prefix)) for line in lines]
    assert len(answers) == len(models), done.stderr[-2000:]
    problems = {n: a["error"] for n, a in zip(names, answers, strict=True) if "error" in a}
    assert not problems
    return {name: shape_of(answer) for name, answer in zip(names, answers, strict=True)}


def num_weights(shape):
    layers = sum(shape.weights_in(p) for part in shape.sublayers for p in part.parameters)
    return layers + shape.other_bytes / shape.dtype_bytes


def check(shapes):
    for name, shape in shapes.items():
        expected = REAL_MODELS[name]
        assert num_weights(shape) == pytest.approx(expected.billions * 1e9, rel=1e-3), name
        assert shape.kv_bytes_per_token == expected.kv_bytes, name


def check_classes(shapes):
    """Compare the bytes of each class of tensors with arithmetic by hand, in 16 bit."""
    seen = set()
    for name, shape in shapes.items():
        config = REAL_MODELS[name].config
        if "layer_types" in config or {"quantization_config", "kv_lora_rank"} & config.keys():
            continue
        if config["model_type"] in ("opt", "qwen3_next"):
            continue
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_size = config.get("head_dim") or hidden // heads
        expected = {"attention matrices": 2 * hidden * (heads + kv_heads) * head_size}
        matrix = hidden * config.get("moe_intermediate_size", config["intermediate_size"])
        num_experts = config.get("num_local_experts") or config.get("num_experts")
        if num_experts:
            expected |= {"routed experts": 3 * num_experts * matrix}
            expected |= {"second FFN matrix": num_experts * hidden}  # the router, of one matrix
        else:
            expected |= {"first FFN matrix": 2 * matrix, "second FFN matrix": matrix}
        found = bytes_by_class(shape)
        assert {one: found[one] for one in expected} == {
            one: 2 * layers * count for one, count in expected.items()
        }, name
        tables = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
        assert found["embeddings and head"] == pytest.approx(2 * tables, rel=1e-3), name
        seen.add(name)
    return seen


def check_plans(shapes):
    """Compare a request's decode step on an H200 with arithmetic by hand.

    Near: the published weights that a token uses, less the embedding, and 1,000 tokens of KV at
    3,840 GB/s. Far: the layers' weights at 55 GB/s, and 30 us for each layer's two transfers.
    Either has 4 ms and 15 us of overhead.
    """
    machine = load_profile("h200-pcie5")
    batch = Batch(requests=1, new_tokens=1, context_tokens=1000)
    for name, shape in shapes.items():
        model = REAL_MODELS[name]
        tables = model.config["vocab_size"] * model.config["hidden_size"] * 2 / 1e9
        is_tied = model.config.get("tie_word_embeddings", True)
        if model.read_gb is not None:
            read_gb = model.read_gb
        elif shape.experts is None or model.active_billions is not None:
            read_gb = 2 * (model.active_billions or model.billions) - (0 if is_tied else tables)
        else:
            continue  # no such number is published
        near = place("flexgen", shape.sublayers, (100.0, 0.0, 0.0))
        seconds = predict_step(shape, machine, near, batch).seconds - 4.015e-3
        by_hand = (read_gb + 1000 * model.kv_bytes / 1e9) / 3840
        assert seconds == pytest.approx(by_hand, rel=0.02), name
        if model.read_gb is None and shape.experts is None:
            layers_gb = 2 * model.billions - (tables if is_tied else 2 * tables)
            far = place("all_far", shape.sublayers)
            seconds = predict_step(shape, machine, far, batch).seconds - 4.015e-3
            transfers = layers_gb / 55 + 30e-6 * model.config["num_hidden_layers"]
            assert seconds == pytest.approx(transfers, rel=0.05), name


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return read(tmp_path_factory.mktemp("few"), FEW)


def test_weights_and_kv_bytes_are_the_published_ones(few):
    check(few)


def test_bytes_of_each_class_are_those_by_hand(few):
    assert check_classes(few) == {"SmolLM2-135M", "Gemma-3-27B", "Qwen3-30B-A3B"}


def test_plans_are_what_arithmetic_by_hand_gives(few):
    check_plans(few)


def test_bytes_of_quantised_checkpoints_are_those_of_their_files(few):
    def gb(name):
        return (few[name].layer_bytes + few[name].other_bytes) / 1e9

    assert gb("Llama-3.3-70B-AWQ") == pytest.approx(39.77, rel=0.01)
    assert gb("gpt-oss-120b") == pytest.approx(65.25, rel=0.01)


def test_windows_keep_the_requests_of_gemma_small(few):
    """52 of 62 layers keep 1,024 tokens, so a request of 32k takes a quarter of a dense model's."""
    shape, load = few["Gemma-3-27B"], Workload(prompt_tokens=32_000, output_tokens=768)
    dense = 2 * 62 * 16 * 128 * 2 * 32_768
    assert load.kv_bytes(shape) / dense == pytest.approx(0.19, abs=0.02)
    left = int(80e9) - shape.layer_bytes - shape.other_bytes
    assert 7 <= load.max_requests_in(shape, left) <= 9


def test_experts_are_known_and_stay_near(few):
    experts = few["Qwen3-30B-A3B"].experts
    assert (experts.num_experts, experts.per_token, len(experts.names)) == (128, 8, 2)
    movable = [p.name for s in few["Qwen3-30B-A3B"].sublayers for p in s.parameters if p.may_move]
    assert movable and not set(movable) & experts.names


@pytest.mark.slow
@pytest.mark.parametrize("name", NESTED)
def test_the_language_model_of_a_nested_configuration(name, tmp_path):
    (nested,) = read(tmp_path, [name], configs=NESTED, stands_in=True).values()
    (tmp_path / "flat").mkdir()
    (flat,) = read(tmp_path / "flat", [name]).values()
    assert nested.kv_bytes_per_token == flat.kv_bytes_per_token
    assert nested.layer_bytes == flat.layer_bytes
    vision = nested.other_bytes - flat.other_bytes
    assert 0.5e9 < vision < 1.2e9, "some 0.4 billion weights of a vision tower are no layers"


@pytest.mark.parametrize("form", [None, "compressed_int4", "gptq"])
def test_bytes_are_those_of_the_files_on_this_machine(form, tmp_path):
    folder = demo_model_dir()
    if form is not None:
        (tmp_path / "model").mkdir()
        folder = quantized_model_dir(folder, form, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (shape,) = read(tmp_path, ["model-read"], configs={"model-read": config}).values()
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert shape.layer_bytes + shape.other_bytes == pytest.approx(files, rel=0.01)


@pytest.mark.parametrize(("algorithm", "is_placed"), [("NVFP4", True), ("MXFP8", False)])
def test_a_format_is_called_what_vllm_calls_it(algorithm, is_placed, tmp_path):
    """Checkpoints of one method may be of several in vLLM, of which not all are placed."""
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    config = {**REAL_MODELS["SmolLM2-135M"].config, "quantization_config": settings}
    (shape,) = read(tmp_path, ["model"], configs={"model": config}).values()
    assert shape.may_be_far is is_placed


@pytest.mark.slow
@pytest.mark.parametrize("make", [coder_model_dir, gemma_model_dir])
def test_bytes_are_those_of_larger_files_on_this_machine(make, tmp_path):
    try:
        folder = make()
    except FileNotFoundError as error:
        pytest.skip(f"its package is not installed: {error}")
    config = json.loads((folder / "config.json").read_text())
    (shape,) = read(tmp_path, ["model-read"], configs={"model-read": config}).values()
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert shape.layer_bytes + shape.other_bytes == pytest.approx(files, rel=0.01)


@pytest.mark.slow
def test_all_published_models(tmp_path):
    shapes = read(tmp_path, list(REAL_MODELS))
    check(shapes)
    check_plans(shapes)
    assert len(check_classes(shapes)) >= 16


def test_a_rank_of_two_has_half_of_each_matrix(few, tmp_path):
    (shape,) = read(tmp_path, ["Qwen3-30B-A3B"], ranks=2).values()
    whole = few["Qwen3-30B-A3B"]
    assert shape.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert num_weights(shape) == pytest.approx(num_weights(whole) / 2, rel=0.01)


def test_why_vllm_does_not_build_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "hidden_size": 64}))
    with pytest.raises(UnsupportedError, match=r"vLLM does not build it: .*new"):
        built_model.built_shape(str(tmp_path))
    assert not (tmp_path / "cache").exists()  # it may be built tomorrow
