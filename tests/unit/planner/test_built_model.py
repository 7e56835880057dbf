# SPDX-License-Identifier: Apache-2.0
"""Shapes from what vLLM says of its class: caches, experts, formats; by hand."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.real_models import REAL_MODELS
from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.planner import built_model
from vllm_tiered.planner.built_model import built_shape, read_config, shape_of
from vllm_tiered.planner.fit import evaluate_placements
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import baseline
from vllm_tiered.planner.model_shape import BoundedKv, model_shape
from vllm_tiered.planner.serving import Workload, estimate_serving
from vllm_tiered.planner.step_time import Batch, all_reduce_seconds, predict_step, roofline
from vllm_tiered.weights.layout import Role

MACHINE = load_profile("rtx4090-pcie4")


def parameter(name, *shape, linear=True, routed=False, movable=True):
    num_bytes = 2
    for size in shape:
        num_bytes *= size
    return {
        "name": name,
        "bytes": num_bytes,
        "shape": list(shape),
        "linear": linear,
        "routed": routed,
        "movable": movable,
    }


DENSE = {
    "parameters": [
        parameter("self_attn.qkv_proj.weight", 96, 64),
        parameter("self_attn.o_proj.weight", 64, 64),
        parameter("input_layernorm.weight", 64, linear=False, movable=False),
        parameter("mlp.gate_up_proj.weight", 256, 64),
        parameter("mlp.down_proj.weight", 64, 128),
    ],
    "experts": None,
}
MIXTURE = {
    "parameters": [
        parameter("self_attn.qkv_proj.weight", 96, 64),
        parameter("self_attn.qkv_proj.bias", 96),
        parameter("mlp.gate.weight", 8, 64, movable=False),
        parameter("mlp.experts.w13_weight", 8, 64, 64, linear=False, routed=True, movable=False),
        parameter("mlp.experts.w2_weight", 8, 64, 32, linear=False, routed=True, movable=False),
    ],
    "experts": {"num_experts": 8, "per_token": 2},
}
FULL = {"page_bytes": 2048, "block_tokens": 16, "most": None, "operations": 128}
WINDOW = {"page_bytes": 4096, "block_tokens": 16, "most": 40, "operations": 256}
STATE = {"page_bytes": 10_000, "block_tokens": 448, "most": 0, "operations": 0}


def facts(layers=(DENSE, DENSE), kv=(FULL, FULL), **changes):
    found = {
        "architecture": "SomeForCausalLM",
        "path": "model.layers",
        "layers": list(layers),
        "other_bytes": 1000,
        "head_bytes": 400,
        "kv": list(kv),
        "dtype_bytes": 2,
        "quantization": None,
        "method": None,
        "max_model_len": 4096,
        **changes,
    }
    if found["quantization"]:
        found["method"] = found["quantization"]["quant_method"]
    return found


def test_sublayers_are_those_of_the_engine():
    shape = shape_of(facts())
    attention, ffn = shape.sublayers[:2]
    assert [p.num_bytes for p in attention.parameters] == [2 * 96 * 64, 2 * 64 * 64, 128]
    assert [p.role for p in ffn.parameters] == [Role.FFN_FIRST, Role.MATRIX]
    assert shape.num_attention == shape.num_layers == 2
    assert (shape.other_bytes, shape.head_bytes, shape.family) == (1000, 400, "SomeForCausalLM")
    assert shape.matrices["mlp.down_proj.weight"] == (64, 128)


def test_windows_and_states_do_not_grow_with_the_request():
    shape = shape_of(facts(kv=(FULL, WINDOW, WINDOW, STATE)))
    assert shape.kv_bytes_per_token == 128
    # A window of 40 tokens takes three blocks and one more, as it begins anywhere in its first.
    assert shape.request_kv_bytes(1000, 16) == 63 * 2048 + 2 * 4 * 4096 + 10_000
    assert shape.request_kv_bytes(20, 16) == 2 * 2048 + 2 * 2 * 4096 + 10_000
    assert shape.read_kv_bytes(1000) == 1000 * 128 + 2 * 40 * 256 + 10_000
    assert shape.read_kv_bytes(10) == 10 * 128 + 2 * 10 * 256 + 10_000


def test_requests_at_a_time_count_windows_and_states():
    shape = shape_of(facts(kv=(FULL, WINDOW, STATE)))
    load = Workload(prompt_tokens=900, output_tokens=100)
    one = shape.request_kv_bytes(1000, 16)
    assert load.kv_bytes(shape, 3) == 3 * one + 2048
    assert load.max_requests_in(shape, 3 * one + 2048) == 3
    assert load.max_requests_in(shape, 3 * one + 2047) == 2


def test_a_layer_that_reads_another_layers_cache_has_arithmetic_and_no_bytes():
    sharing = {"page_bytes": 0, "block_tokens": 1, "most": None, "operations": 128}
    shape = shape_of(facts(kv=(FULL, sharing)))
    assert (shape.kv_bytes_per_token, shape.pair_operations) == (128, 256)


def test_arithmetic_of_attention_grows_with_the_square_but_not_over_windows():
    shape = shape_of(facts(kv=(FULL, WINDOW)))
    pairs = 1000 * 1001 / 2
    assert shape.attention_operations(1000, 0) == 128 * pairs + 256 * 1000 * 40
    assert shape.attention_operations(1, 20) == (128 + 256) * 21


def test_a_long_prompt_is_computed_in_chunks_that_stream_the_weights_again():
    shape = shape_of(facts())
    load = Workload(prompt_tokens=5000, output_tokens=10, max_batched_tokens=2048)
    assert load.prefill_steps() == [
        Batch(requests=1, new_tokens=2048, context_tokens=0),
        Batch(requests=1, new_tokens=2048, context_tokens=2048),
        Batch(requests=1, new_tokens=904, context_tokens=4096),
    ]
    placement = baseline("all_far", shape)
    served = estimate_serving(shape, MACHINE, placement, load, 1)
    steps = [predict_step(shape, MACHINE, placement, batch) for batch in load.prefill_steps()]
    assert served.prefill_seconds == pytest.approx(sum(step.seconds for step in steps))


@pytest.mark.parametrize(
    ("model", "placement", "seconds"),
    [
        ("Llama-3.1-8B", "all near", 6.8),
        ("Llama-3.3-70B", "all near", 53.7),
        ("Llama-3.3-70B", "all_far", 107),
    ],
    ids=["8B near", "70B near", "70B far"],
)
def test_a_prompt_of_32k_by_hand(model, placement, seconds):
    """On 110 TFLOPS: 2 operations a weight and token, 4 x width for each pair of tokens and layer;
    16 chunks of 2,048 tokens read all far weights over 25 GB/s, behind which most is computed.
    """
    config = REAL_MODELS[model].config
    shape = model_shape(config)
    machine = replace(MACHINE, far_layer_overhead_us=0, step_overhead_ms=0)
    load = Workload(prompt_tokens=32768, output_tokens=1, max_batched_tokens=2048)
    found = estimate_serving(shape, machine, baseline(placement, shape), load, 1).prefill_seconds
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    products = 2 * shape.layer_bytes / 2 * 32768
    pairs = 4 * hidden * layers * 32768 * 32769 / 2
    arithmetic = (products + pairs) / 110e12
    transfers = 16 * shape.layer_bytes / 25e9 if placement == "all_far" else 0
    least, most = max(arithmetic, transfers), arithmetic + transfers
    assert 0.99 * least < found < 1.02 * most
    assert found == pytest.approx(seconds, rel=0.02)
    without_pairs = products / 110e12
    assert found > 1.2 * without_pairs, "attention counts"


def test_a_step_reads_the_experts_that_its_tokens_are_routed_to():
    shape = shape_of(facts(layers=[MIXTURE], kv=[FULL]))
    (experts,) = (p for s in shape.sublayers for p in s.parameters if p.name.endswith("w2_weight"))
    assert experts.role is Role.FIXED
    assert shape.share_read(experts, 1) == pytest.approx(0.25)
    assert shape.share_read(experts, 2) == pytest.approx(1 - 0.75**2)
    assert shape.share_computed(experts) == 0.25
    ffn = shape.sublayers[1]
    of_experts = 2 * 8 * (64 * 64 + 64 * 32)
    one = roofline(ffn, shape, MACHINE, Batch(requests=1, new_tokens=1, context_tokens=0))
    near = MACHINE.near_gb_per_s * 1e9
    assert one.weights == pytest.approx((2 * 8 * 64 + of_experts / 4) / near)
    assert one.arithmetic == pytest.approx(2 * (8 * 64 + of_experts / 8) / (MACHINE.tflops * 1e12))


def test_a_quantised_checkpoint_has_fewer_bytes_and_as_many_weights():
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    plain, packed = shape_of(facts()), shape_of(facts(quantization=awq))
    o_proj = packed.sublayers[0].parameters[1]
    assert o_proj.num_bytes == round(64 * 64 * (4 + 20 / 32) / 8)
    assert packed.weights_in(o_proj) == 64 * 64
    assert packed.sublayers[0].parameters[2] == plain.sublayers[0].parameters[2]  # a norm
    assert packed.quantization == "awq 4 bit" and plain.quantization is None
    with pytest.raises(UnsupportedError, match="quantised already"):
        shape_of(facts(quantization=awq), compress="int4")


@pytest.mark.parametrize(
    ("changes", "is_offered"),
    [
        ({}, True),
        ({"kv": (FULL, WINDOW)}, True),
        ({"kv": (FULL, STATE)}, False),
        ({"quantization": {"quant_method": "fp8"}}, False),
    ],
    ids=["dense", "windows", "states", "quantised"],
)
def test_a_plan_that_the_engine_refuses_is_not_offered(changes, is_offered):
    shape = shape_of(facts(**changes))
    load = Workload(prompt_tokens=64, output_tokens=64, max_requests=2)
    results = evaluate_placements(shape, MACHINE, load, 1 << 30, 1 << 30)
    assert ("throughput" in {result.placement for result in results}) is is_offered


def test_experts_in_mxfp4_leave_attention_as_it_is():
    shape = shape_of(facts(layers=[MIXTURE], kv=[FULL], quantization={"quant_method": "mxfp4"}))
    sizes = {p.name: p.num_bytes for s in shape.sublayers for p in s.parameters}
    assert sizes["mlp.experts.w2_weight"] == 8 * 64 * 32 * 4.25 / 8
    assert sizes["self_attn.qkv_proj.weight"] == 2 * 96 * 64


def test_a_window_of_a_short_request():
    kv = BoundedKv(num_layers=3, page_bytes=100, block_tokens=16, max_tokens=64)
    assert kv.request_bytes(16) == 300
    assert kv.request_bytes(10_000) == 3 * 100 * 5


@pytest.mark.parametrize(
    ("model", "message"),
    [("/nowhere/model", "there is no such folder"), ("a/b/c", "there is no such folder")],
)
def test_what_is_neither_a_folder_nor_a_name_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        built_shape(model)


def test_an_answer_is_kept_by_all_that_it_depends_on(monkeypatch, tmp_path):
    asked: list[tuple[str, str, int]] = []

    def ask(model, dtype, ranks):
        asked.append((model, dtype, ranks))
        return facts()

    monkeypatch.setattr(built_model, "_ask", ask)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 64}))
    first = built_shape(str(model))
    assert built_shape(str(model / "config.json")) == first and len(asked) == 1
    built_shape(str(model), dtype="float32")
    built_shape(str(model), tensor_parallel=2)
    (model / "config.json").write_text(json.dumps({"hidden_size": 65}))
    built_shape(str(model))
    assert len(asked) == 4


def test_a_damaged_answer_is_asked_for_again(monkeypatch, tmp_path):
    monkeypatch.setattr(built_model, "_ask", lambda *_: facts())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    first = built_shape(str(tmp_path))
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text("{")
    assert built_shape(str(tmp_path)) == first
    assert json.loads(kept.read_text())["path"] == "model.layers"


def folder_of_model(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    return str(path)


def test_a_pipe_in_the_cache_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(built_model, "_ask", lambda *_: facts())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = folder_of_model(tmp_path / "model")
    first = built_shape(model)
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.unlink()
    os.mkfifo(kept)
    assert built_shape(model) == first
    kept.write_text("[" * 10**5)
    assert built_shape(model) == first
    kept.write_text("[]")
    assert built_shape(model) == first


@pytest.mark.parametrize("call", ["stat", "open", "mkdir"])
def test_without_a_cache_that_can_be_used_it_is_asked_anew(monkeypatch, tmp_path, call):
    """The folder is closed: root, who may run the tests, is let in all the same."""

    def deny(function):
        def denied(path, *args, **kwargs):
            if str(path).startswith(str(tmp_path / "cache")):
                raise PermissionError(13, os.strerror(13))
            return function(path, *args, **kwargs)

        return denied

    monkeypatch.setattr(built_model, "_ask", lambda *_: facts())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = folder_of_model(tmp_path / "model")
    monkeypatch.setattr(os, call, deny(getattr(os, call)))
    assert built_shape(model) == shape_of(facts())


def test_a_user_without_a_home_has_no_cache(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(built_model, "_ask", lambda *_: facts())
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert built_shape(folder_of_model(tmp_path / "model")) == shape_of(facts())


def test_links_in_the_cache_are_not_written_through(monkeypatch, tmp_path):
    monkeypatch.setattr(built_model, "_ask", lambda *_: facts())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = folder_of_model(tmp_path / "model")
    built_shape(model)
    (kept,) = (tmp_path / "cache").rglob("*.json")
    (tmp_path / "thesis").write_text("my thesis")
    kept.unlink()
    kept.symlink_to(tmp_path / "thesis")
    kept.with_suffix(f".{os.getpid()}").symlink_to(tmp_path / "thesis")
    built_shape(model)
    assert (tmp_path / "thesis").read_text() == "my thesis"
    assert json.loads(kept.read_text()) == facts() and not kept.is_symlink()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10**5, "config.json: is not valid JSON: more than 64 tables and lists"),
        ('{"a": ' * 10**5, "config.json: is not valid JSON: more than 64 tables and lists"),
        ("[]", "config.json: is not a model's configuration"),
        (None, "config.json: is not a regular file"),
    ],
    ids=["lists", "tables", "list", "pipe"],
)
def test_a_configuration_that_plays_tricks_is_refused(tmp_path, text, message):
    if text is None:
        os.mkfifo(tmp_path / "config.json")
    else:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        built_shape(str(tmp_path))


def test_a_configuration_may_have_what_transformers_takes(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "a": 1, "a": 2}')
    assert read_config(tmp_path) == {"time_step_limit": [0.0, math.inf], "a": 2}


def test_a_closed_folder_of_a_model_is_refused_by_name(monkeypatch, tmp_path):
    def denied(path, *args, **kwargs):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(ConfigError, match=r"/closed/model: cannot be looked at: Permission denied"):
        built_shape("/closed/model")
    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(ConfigError, match=r"model: cannot be read: Permission denied"):
        read_config(Path("/closed/model"))


def test_ranks_add_up_each_sublayers_outputs():
    """Two of 64 x 2 bytes a token, each half of which goes and comes once: 128 bytes a token."""
    alone = shape_of(facts(hidden_size=64))
    pair = shape_of(facts(hidden_size=64, num_ranks=2))
    batch = Batch(requests=10, new_tokens=100, context_tokens=0)
    near = baseline("all near", alone)
    added = (
        predict_step(pair, MACHINE, near, batch).seconds
        - predict_step(alone, MACHINE, near, batch).seconds
    )
    through_far = 1000 * 128 / (MACHINE.read_gb_per_s / 2 * 1e9)
    assert added == pytest.approx(4 * (20e-6 + through_far))
    linked = replace(MACHINE, peer_gb_per_s=100.0)
    assert all_reduce_seconds(pair, linked, 1000) == pytest.approx(20e-6 + 128e3 / 100e9)
    assert all_reduce_seconds(alone, linked, 1000) == 0
