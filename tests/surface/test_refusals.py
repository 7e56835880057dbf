# SPDX-License-Identifier: Apache-2.0
"""Combinations refused at start: each names the setting, its value, the reason and the way out."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered.adapter import checks as refusals
from vllm_tiered.errors import UnsupportedError

ON: dict[str, Any] = {"tiered": {}}


def transfer_config(**fields):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_role="kv_both", **fields)


def encode_only():
    from vllm.config import ECTransferConfig

    return ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_producer")


# Fields of EngineArgs (callables are called for their value), and what the message must hold.
BY_ARGUMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "kv_connector": (
        {"kv_transfer_config": lambda: transfer_config(kv_connector="OffloadingConnector")},
        ["--kv-transfer-config", "kv_connector=OffloadingConnector"],
    ),
    "kv_offloading_size": (
        {"kv_offloading_size": 4.0},
        ["--kv-offloading-size 4.0", "--tiered-config.kv.far_gib"],
    ),
    "speculative_config": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ["--speculative-config", "ngram"],
    ),
    "spec_method": ({"spec_method": "ngram"}, ["--spec-method ngram"]),
    "diffusion_config": ({"diffusion_config": {"canvas_length": 8}}, ["--diffusion-config"]),
    "pipeline_parallel": (
        {"pipeline_parallel_size": 2},
        ["--pipeline-parallel-size 2", "--tensor-parallel-size"],
    ),
    "prefill_context_parallel": (
        {"prefill_context_parallel_size": 2},
        ["--prefill-context-parallel-size 2"],
    ),
    "decode_context_parallel": (
        {"decode_context_parallel_size": 2},
        ["--decode-context-parallel-size 2"],
    ),
    "data_parallel": (
        {"data_parallel_size": 2},
        ["--data-parallel-size 2", "--tiered-config.kv.far_gib"],
    ),
    "elastic_ep": ({"enable_elastic_ep": True}, ["--enable-elastic-ep"]),
    "dual_batch_overlap": ({"enable_dbo": True}, ["--enable-dbo"]),
    "microbatches": ({"ubatch_size": 2}, ["--ubatch-size 2"]),
    "kv_sharing_fast_prefill": (
        {"kv_sharing_fast_prefill": True},
        ["--kv-sharing-fast-prefill"],
    ),
    "sleep_mode": ({"enable_sleep_mode": True}, ["--enable-sleep-mode"]),
    "encode_only": ({"ec_transfer_config": encode_only}, ["--ec-transfer-config", "ec_producer"]),
}


@pytest.mark.parametrize("name", BY_ARGUMENTS)
def test_refused_by_its_arguments_before_vllm_does_anything(make_engine_args, monkeypatch, name):
    fields, expected = BY_ARGUMENTS[name]
    fields = {field: value() if callable(value) else value for field, value in fields.items()}
    engine_args = make_engine_args(additional_config=ON, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError) as refused:
        engine_args.create_engine_config()
    message = str(refused.value)
    for part in [*expected, "What to do:", "tiered.kv.enabled to false"]:
        assert part in message


def test_the_tables_and_these_tests_cover_the_same():
    # Two tests each for speculation (config and method) and for microbatches (flag and size).
    assert len(BY_ARGUMENTS) == len(refusals.kv.ENGINE_ARGS) + 2
    assert len(BY_MODEL) == len(refusals.kv.VLLM_CONFIG)


BY_WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "quantization": ({"quantization": "fp8"}, "--quantization fp8"),
    "cpu_offload": ({"cpu_offload_gb": 1.0}, "--cpu-offload-gb 1.0"),
    "prefetch_offload": ({"offload_group_size": 2}, "--offload-group-size 2"),
    "weight_transfer": (
        {"weight_transfer_config": {"backend": "nccl"}},
        "--weight-transfer-config",
    ),
    "lora": ({"enable_lora": True}, "--enable-lora"),
    "pipeline_parallel": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    "speculation": ({"spec_method": "ngram"}, "--spec-method ngram"),
    "microbatches": ({"ubatch_size": 2}, "--ubatch-size 2"),
    "sleep_mode": ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
}


@pytest.mark.parametrize("name", BY_WEIGHTS)
def test_placed_weights_refuse_it_before_vllm_does_anything(make_engine_args, monkeypatch, name):
    fields, expected = BY_WEIGHTS[name]
    tiered = {"kv": {"enabled": False}, "weights": {"placement": "helm"}}
    engine_args = make_engine_args(additional_config={"tiered": tiered}, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError) as refused:
        engine_args.create_engine_config()
    for part in [expected, "cannot place weights", "tiered.weights.placement to off"]:
        assert part in str(refused.value)


BY_WEIGHTS_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "quantized": ({"quantization": "gptq"}, "org/model (gptq weights)"),
    "experts": ({"is_moe": True}, "org/model (mixture of experts)"),
    "hybrid": ({"is_hybrid": True}, "org/model (attention mixed with Mamba"),
    "attention_free": ({"is_attention_free": True}, "org/model (attention-free)"),
    "freezing": ({"inductor": {"max_autotune": True}}, "inductor_compile_config with max_autotune"),
}


@pytest.mark.parametrize("name", BY_WEIGHTS_MODEL)
def test_placed_weights_refuse_models(name):
    changes, expected = BY_WEIGHTS_MODEL[name]
    fields = {"quantization": None, "is_moe": False, **changes}
    inductor = fields.pop("inductor", {})
    config = config_of(fields)
    config.compilation_config = SimpleNamespace(inductor_compile_config=inductor)
    with pytest.raises(UnsupportedError, match=r"tiered\.weights\.placement to off") as refused:
        refusals.check_weights_config(config)
    assert expected in str(refused.value)


def test_a_dense_decoders_weights_are_placed():
    config = config_of({"quantization": None, "is_moe": False})
    config.compilation_config = SimpleNamespace(inductor_compile_config={})
    refusals.check_weights_config(config)
    for device_type in ("cpu", "cuda"):
        refusals.check_weights_device(device_type)
    with pytest.raises(UnsupportedError, match=r'device is "xpu": set tiered\.weights\.placement'):
        refusals.check_weights_device("xpu")


def test_all_that_placed_weights_refuse_is_tested():
    # Two tests for moving weights elsewhere, and two for attention.
    assert len(BY_WEIGHTS) == len(refusals.weights.ENGINE_ARGS) + 1
    assert len(BY_WEIGHTS_MODEL) == len(refusals.weights.VLLM_CONFIG) + 1


BY_FFN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "quantization": ({"quantization": "fp8"}, ["--quantization fp8", "leave it out"]),
    "cpu_offload": ({"cpu_offload_gb": 1.0}, ["--cpu-offload-gb 1.0", "one home"]),
    "prefetch_offload": ({"offload_group_size": 2}, ["--offload-group-size 2"]),
    "weight_transfer": (
        {"weight_transfer_config": {"backend": "nccl"}},
        ["--weight-transfer-config", "in a file"],
    ),
    "lora": ({"enable_lora": True}, ["--enable-lora", "adapters are added"]),
    "pipeline_parallel": (
        {"pipeline_parallel_size": 2},
        ["--pipeline-parallel-size 2", "use --tensor-parallel-size instead"],
    ),
    "speculative_config": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ["--speculative-config", "ngram", "leave speculative decoding out"],
    ),
    "microbatches": ({"ubatch_size": 2}, ["--ubatch-size 2"]),
    "sleep_mode": ({"enable_sleep_mode": True}, ["--enable-sleep-mode"]),
}


@pytest.mark.parametrize("name", BY_FFN)
def test_a_neuron_store_refuses_it_before_vllm_does_anything(make_engine_args, monkeypatch, name):
    fields, expected = BY_FFN[name]
    tiered = {"ffn": {"store": "/a/store"}}
    engine_args = make_engine_args(additional_config={"tiered": tiered}, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError) as refused:
        engine_args.create_engine_config()
    for part in [*expected, "FFN from a neuron store", "or leave tiered.ffn.store out"]:
        assert part in str(refused.value)


BY_FFN_MODEL: dict[str, tuple[dict[str, Any], Any, str]] = {
    "quantized": ({"quantization": "gptq"}, None, "org/model (gptq weights)"),
    "experts": ({"is_moe": True}, None, "org/model (mixture of experts)"),
    "attention_free": ({"is_attention_free": True}, None, "org/model (attention-free)"),
    "brings_its_draft": ({}, SimpleNamespace(method="eagle3"), "speculative decoding (eagle3)"),
}


@pytest.mark.parametrize("name", BY_FFN_MODEL)
def test_a_neuron_store_refuses_models(name):
    changes, speculation, expected = BY_FFN_MODEL[name]
    config = config_of({"quantization": None, "is_moe": False, **changes}, speculation)
    with pytest.raises(UnsupportedError, match=r"or leave tiered\.ffn\.store out") as refused:
        refusals.check_ffn_config(config)
    assert expected in str(refused.value) and "What to do:" in str(refused.value)


def test_a_dense_decoder_is_computed_from_neurons(make_engine_args):
    refusals.check_ffn_config(config_of({"quantization": None, "is_moe": False}))
    refusals.check_ffn_args(make_engine_args(tensor_parallel_size=2), "cpu")
    refusals.check_ffn_args(make_engine_args(), "cuda")
    with pytest.raises(UnsupportedError, match=r'device is "xpu": leave tiered\.ffn\.store out'):
        refusals.check_ffn_args(make_engine_args(), "xpu")


def test_all_that_a_neuron_store_refuses_is_tested():
    assert len(BY_FFN) == len(refusals.ffn.ENGINE_ARGS) + 1  # two for moving weights elsewhere
    assert len(BY_FFN_MODEL) == len(refusals.ffn.VLLM_CONFIG)


def test_nothing_is_refused_with_kv_switched_off(make_engine_args):
    engine_args = make_engine_args(
        additional_config={"tiered": {"kv": {"enabled": False}}},
        kv_transfer_config=transfer_config(kv_connector="ExampleConnector"),
    )
    config = engine_args.create_engine_config()
    assert config.kv_transfer_config.kv_connector == "ExampleConnector"


@pytest.mark.parametrize(
    "fields",
    [
        {"cpu_offload_gb": 1.0},
        {"kv_cache_dtype": "fp8"},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"enable_prefix_caching": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_not_refused(make_engine_args, fields):
    engine_args = make_engine_args(additional_config=ON, **fields)
    refusals.check_engine_args(engine_args)


GENERATE = {
    "runner_type": "generate",
    "model": "org/model",
    "is_encoder_decoder": False,
    "is_attention_free": False,
    "is_hybrid": False,
    "use_mla": False,
}

BY_MODEL: dict[str, tuple[dict[str, Any], Any, str]] = {
    "pooling": ({"runner_type": "pooling"}, None, "runner type 'pooling'"),
    "encoder_decoder": ({"is_encoder_decoder": True}, None, "org/model (encoder-decoder)"),
    "attention_free": ({"is_attention_free": True}, None, "org/model (attention-free)"),
    "hybrid": ({"is_hybrid": True}, None, "org/model (attention mixed with Mamba"),
    "mla": ({"use_mla": True}, None, "org/model (multi-head latent attention)"),
    "brings_its_draft": ({}, SimpleNamespace(method="eagle3"), "speculative decoding (eagle3)"),
}


def config_of(fields, speculative_config=None):
    fields = GENERATE | fields
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        speculative_config=speculative_config,
    )


@pytest.mark.parametrize("name", BY_MODEL)
def test_refused_by_its_model(name):
    fields, speculation, expected = BY_MODEL[name]
    with pytest.raises(UnsupportedError) as refused:
        refusals.check_vllm_config(config_of(fields, speculation))
    assert expected in str(refused.value)
    assert "What to do:" in str(refused.value)


def attention(*names):
    """Layers with backends of vLLM's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backends = [AttentionBackendEnum[name].get_class() for name in names]
    return [SimpleNamespace(get_attn_backend=lambda each=each: each) for each in backends]


def test_refused_by_its_attention():
    with pytest.raises(UnsupportedError, match="the attention backend FLEX_ATTENTION: its block"):
        refusals.check_attention(attention("CPU_ATTN", "FLEX_ATTENTION"))


def test_attention_by_block_table_is_not_refused():
    refusals.check_attention(attention("CPU_ATTN", "TRITON_ATTN"))


def test_a_plain_decoder_is_not_refused():
    refusals.check_vllm_config(config_of({}))


def test_the_model_fields_are_vllms_own(make_engine_args):
    model_config = make_engine_args().create_model_config()
    assert {name: getattr(model_config, name) for name in GENERATE} == GENERATE | {
        "model": model_config.model
    }


def test_a_pooling_model_is_refused_when_vllm_has_read_it(make_engine_args):
    engine_args = make_engine_args(additional_config=ON, runner="pooling", convert="embed")
    with pytest.raises(UnsupportedError, match="runner type 'pooling'"):
        engine_args.create_engine_config()
