# SPDX-License-Identifier: Apache-2.0
"""Compatibility checks at start: a message names the setting, the reason and what to change."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered.adapter import checks, engine_config
from vllm_tiered.adapter.checks import Part
from vllm_tiered.adapter.checks.base import find_conflicts
from vllm_tiered.adapter.kv.plan import tiered_config
from vllm_tiered.config import TieredConfig
from vllm_tiered.errors import UnsupportedError

ON: dict[str, Any] = {"tiered": {}}
BY_HAND: dict[str, Any] = {"tiered": {"kv": {"expansion": 2.0}}}


def transfer_config(**fields):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_role="kv_both", **fields)


def encode_only():
    from vllm.config import ECTransferConfig

    return ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_producer")


# By feature (`:2` for a second test of one): fields of EngineArgs (callables are called for their
# value), and what the message must hold.
KV_ARGUMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "other_kv_connector": (
        {"kv_transfer_config": lambda: transfer_config(kv_connector="OffloadingConnector")},
        ["--kv-transfer-config", "kv_connector=OffloadingConnector"],
    ),
    "kv_offloading": (
        {"kv_offloading_size": 4.0},
        ["--kv-offloading-size 4.0", "--tiered-config.kv.far_gib"],
    ),
    "diffusion_decoding": ({"diffusion_config": {"canvas_length": 8}}, ["--diffusion-config"]),
    "prefill_context_parallel": (
        {"prefill_context_parallel_size": 2},
        ["--prefill-context-parallel-size 2"],
    ),
    "decode_context_parallel": (
        {"decode_context_parallel_size": 2},
        ["--decode-context-parallel-size 2"],
    ),
    "elastic_expert_parallel": ({"enable_elastic_ep": True}, ["--enable-elastic-ep"]),
    "microbatches": ({"enable_dbo": True}, ["--enable-dbo"]),
    "microbatches:2": ({"ubatch_size": 2}, ["--ubatch-size 2"]),
    "kv_sharing_fast_prefill": (
        {"kv_sharing_fast_prefill": True},
        ["--kv-sharing-fast-prefill"],
    ),
    "sleep_mode": ({"enable_sleep_mode": True}, ["--enable-sleep-mode"]),
    "encode_only": ({"ec_transfer_config": encode_only}, ["--ec-transfer-config", "ec_producer"]),
}


def connector(config):
    transfer = config.kv_transfer_config
    return transfer and transfer.kv_connector


def arguments(name):
    fields, expected = KV_ARGUMENTS[name]
    fields = {field: value() if callable(value) else value for field, value in fields.items()}
    return fields, expected


@pytest.mark.parametrize("name", KV_ARGUMENTS)
@pytest.mark.parametrize(
    "kv",
    [{"expansion": 2.0}, {"tier": "storage", "path": "/"}, {"policy": "on_demand"}],
    ids=lambda kv: next(iter(kv)),
)
def test_arguments_that_kv_set_by_hand_refuses_before_vllm_does_anything(
    make_engine_args, monkeypatch, name, kv
):
    fields, expected = arguments(name)
    engine_args = make_engine_args(additional_config={"tiered": {"kv": kv}}, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError) as refused:
        engine_args.create_engine_config()
    message = str(refused.value)
    for part in [*expected, "What to do:", "tiered.kv.enabled to false"]:
        assert part in message


@pytest.mark.parametrize("told", [False, True])
def test_sleep_mode_rules_kv_out_only_where_connectors_are_not_told(
    make_engine_args, monkeypatch, told
):
    monkeypatch.setattr(checks.engine_args, "tells_connectors_of_sleep", lambda: told)
    sleeping = make_engine_args(enable_sleep_mode=True)
    found = [
        setting
        for part in (Part.KV, Part.WEIGHTS)
        for setting, _ in find_conflicts(checks.engine_args.ENGINE_ARGS_CHECKS, part, sleeping)
    ]
    assert found == ["--enable-sleep-mode"] * (1 if told else 2)


@pytest.mark.parametrize("name", KV_ARGUMENTS)
def test_arguments_are_left_to_vllm_by_default(make_engine_args, caplog_vllm, name):
    """An engine that vLLM makes without the plugin is made with it, too, and the other way."""
    fields, expected = arguments(name)

    def outcome(**additional):
        try:
            return make_engine_args(**additional, **fields).create_engine_config()
        except Exception as error:
            return str(error)

    plain, tiered = outcome(), outcome(additional_config=ON)
    lines = [r.getMessage() for r in caplog_vllm.records if "steps aside" in r.getMessage()]
    if isinstance(plain, str):  # not on this machine
        assert tiered == plain and not lines
        return
    assert connector(tiered) == connector(plain)
    reason = tiered.additional_config["tiered_steps_aside"]["kv"]
    assert expected[0] in reason
    assert len(lines) == 1 and reason in lines[0]
    assert tiered_config(tiered) is None
    assert tiered.additional_config["tiered"] == TieredConfig().to_dict(), "what was asked for"


def test_what_vllm_refuses_with_any_connector_is_left_to_it(
    make_engine_args, monkeypatch, caplog_vllm
):
    """Checks cannot know all of vLLM's own rules."""
    from vllm.config import VllmConfig

    check = VllmConfig._post_init_kv_transfer_config

    def refuse(self):
        if self.kv_transfer_config is not None:
            raise ValueError("no connectors on Thursdays")
        check(self)

    monkeypatch.setattr(VllmConfig, "_post_init_kv_transfer_config", refuse)
    config = make_engine_args(additional_config=ON).create_engine_config()
    assert config.kv_transfer_config is None
    assert "no connectors on Thursdays" in config.additional_config["tiered_steps_aside"]["kv"]
    with pytest.raises(ValueError, match="no connectors on Thursdays"):
        make_engine_args(additional_config=BY_HAND).create_engine_config()


WEIGHTS_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "cpu_offload": ({"cpu_offload_gb": 1.0}, "--cpu-offload-gb 1.0"),
    "cpu_offload:2": ({"offload_group_size": 2}, "--offload-group-size 2"),
    "weight_transfer": (
        {"weight_transfer_config": {"backend": "nccl"}},
        "--weight-transfer-config",
    ),
    "microbatches": ({"ubatch_size": 2}, "--ubatch-size 2"),
    "sleep_mode": ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
}


@pytest.mark.parametrize("name", WEIGHTS_ARGUMENTS)
def test_arguments_that_placed_weights_refuse_before_vllm_does_anything(
    make_engine_args, monkeypatch, name
):
    fields, expected = WEIGHTS_ARGUMENTS[name]
    tiered = {"kv": {"enabled": False}, "weights": {"placement": "helm"}}
    engine_args = make_engine_args(additional_config={"tiered": tiered}, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError) as refused:
        engine_args.create_engine_config()
    for part in [expected, "cannot place weights", "tiered.weights.placement to off"]:
        assert part in str(refused.value)


PLANNED: dict[str, Any] = {"placement": "throughput", "near_gib": 1}
DRAFT_MODEL = SimpleNamespace(method="eagle3", draft_model_config=object())
# By feature: fields of the model, the section `weights`, the speculation, what the message holds.
WEIGHTS_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "other_quantization": ({"quantization": "torchao"}, {}, None, "org/model (torchao weights)"),
    "online_quantization": ({"quantization": "fp8"}, {}, None, "--quantization fp8"),
    "quantization_beside_planned_weights": (
        {"quantization": "fp8", "quantization_config": {"quant_method": "fp8"}},
        PLANNED,
        None,
        "org/model (fp8 weights)",
    ),
    "quantization_beside_planned_weights:2": (
        {"quantization": "fp8", "quantization_config": {"quant_method": "fp8"}},
        {"placement": "all_far", "compress": "int4"},
        None,
        "leave weights.compress out",
    ),
    "recurrent_state_beside_planned_weights": ({"is_hybrid": True}, PLANNED, None, "org/model"),
    "recurrent_state_beside_planned_weights:2": (
        {"is_attention_free": True},
        PLANNED,
        None,
        "recurrent states do not grow",
    ),
    "pipeline_beside_planned_weights": (
        {"stages": 2},
        PLANNED,
        None,
        "--pipeline-parallel-size 2",
    ),
    "drafts_beside_planned_weights": ({}, PLANNED, DRAFT_MODEL, "speculative decoding (eagle3)"),
    "inductor_freezing": (
        {"inductor": {"max_autotune": True}},
        {},
        None,
        "inductor_compile_config with max_autotune",
    ),
}


def config_with_weights(changes, weights, speculation=None):
    fields = {"quantization": None, "is_moe": False, "quantization_config": None, **changes}
    inductor, quantization = (fields.pop(name, {}) for name in ("inductor", "quantization_config"))
    config = config_of(fields, speculation)
    config.model_config.hf_config = SimpleNamespace(quantization_config=quantization)
    config.compilation_config = SimpleNamespace(inductor_compile_config=inductor)
    config.additional_config = {"tiered": {"weights": weights}}
    return config


@pytest.mark.parametrize("name", WEIGHTS_MODELS)
def test_models_that_placed_weights_refuse(name):
    changes, weights, speculation, expected = WEIGHTS_MODELS[name]
    config = config_with_weights(changes, weights, speculation)
    with pytest.raises(UnsupportedError, match=r"tiered\.weights\.placement to off") as refused:
        checks.check_vllm_config(Part.WEIGHTS, config)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_moe": True},
        {"use_mla": True},
        {"is_hybrid": True},
        {"is_attention_free": True},
        {"stages": 2},
        *(
            {"quantization": method, "quantization_config": {"quant_method": method}}
            for method in ("fp8", "compressed-tensors", "auto_gptq", "awq_marlin", "mxfp4")
        ),
    ],
    ids=str,
)
def test_weights_that_are_placed(changes):
    checks.check_vllm_config(
        Part.WEIGHTS, config_with_weights(changes, {"placement": "helm"}, DRAFT_MODEL)
    )


def test_ngrams_go_with_planned_weights():
    ngram = SimpleNamespace(method="ngram", draft_model_config=None)
    checks.check_vllm_config(Part.WEIGHTS, config_with_weights({}, PLANNED, ngram))


def test_devices_that_weights_are_placed_on():
    for device_type in ("cpu", "cuda"):
        checks.check_device(Part.WEIGHTS, device_type)
    with pytest.raises(UnsupportedError, match=r'device is "xpu": set tiered\.weights\.placement'):
        checks.check_device(Part.WEIGHTS, "xpu")


def test_mxfp4_is_of_experts_alone():
    """So a layer's other weights are in 16 bit."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config

    linear = LinearBase.__new__(LinearBase)
    for config in (Mxfp4Config(), GptOssMxfp4Config()):
        assert isinstance(config.get_quant_method(linear, "a.b"), UnquantizedLinearMethod)


FFN_ARGUMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "quantization": ({"quantization": "fp8"}, ["--quantization fp8", "leave it out"]),
    "cpu_offload": ({"cpu_offload_gb": 1.0}, ["--cpu-offload-gb 1.0", "one home"]),
    "cpu_offload:2": ({"offload_group_size": 2}, ["--offload-group-size 2"]),
    "weight_transfer": (
        {"weight_transfer_config": {"backend": "nccl"}},
        ["--weight-transfer-config", "in a file"],
    ),
    "lora": ({"enable_lora": True}, ["--enable-lora", "adapters are added"]),
    "pipeline_parallel": (
        {"pipeline_parallel_size": 2},
        ["--pipeline-parallel-size 2", "use --tensor-parallel-size instead"],
    ),
    "speculative_decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ["--speculative-config", "ngram", "leave speculative decoding out"],
    ),
    "microbatches": ({"ubatch_size": 2}, ["--ubatch-size 2"]),
    "sleep_mode": ({"enable_sleep_mode": True}, ["--enable-sleep-mode"]),
}


@pytest.mark.parametrize("name", FFN_ARGUMENTS)
def test_arguments_that_a_neuron_store_refuses_before_vllm_does_anything(
    make_engine_args, monkeypatch, name
):
    fields, expected = FFN_ARGUMENTS[name]
    tiered = {"ffn": {"store": "/a/store"}}
    engine_args = make_engine_args(additional_config={"tiered": tiered}, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError) as refused:
        engine_args.create_engine_config()
    for part in [*expected, "FFN from a neuron store", "or leave tiered.ffn.store out"]:
        assert part in str(refused.value)


FFN_MODELS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "quantization": ({"quantization": "gptq"}, None, "org/model (gptq weights)"),
    "mixture_of_experts": ({"is_moe": True}, None, "org/model (mixture of experts)"),
    "attention_free": ({"is_attention_free": True}, None, "org/model (attention-free)"),
    "speculative_decoding": ({}, SimpleNamespace(method="eagle3"), "speculative decoding (eagle3)"),
}


@pytest.mark.parametrize("name", FFN_MODELS)
def test_models_that_a_neuron_store_refuses(name):
    changes, speculation, expected = FFN_MODELS[name]
    config = config_of({"quantization": None, "is_moe": False, **changes}, speculation)
    with pytest.raises(UnsupportedError, match=r"or leave tiered\.ffn\.store out") as refused:
        checks.check_vllm_config(Part.FFN, config)
    assert expected in str(refused.value) and "What to do:" in str(refused.value)


def test_a_dense_decoder_is_computed_from_neurons(make_engine_args):
    checks.check_vllm_config(Part.FFN, config_of({"quantization": None, "is_moe": False}))
    checks.check_engine_args(Part.FFN, make_engine_args(tensor_parallel_size=2))
    for device_type in ("cpu", "cuda"):
        checks.check_device(Part.FFN, device_type)
    with pytest.raises(UnsupportedError, match=r'device is "xpu": leave tiered\.ffn\.store out'):
        checks.check_device(Part.FFN, "xpu")


EXPERTS_ARGUMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "cpu_offload": ({"cpu_offload_gb": 1.0}, ["--cpu-offload-gb 1.0", "one home"]),
    "weight_transfer": (
        {"weight_transfer_config": {"backend": "nccl"}},
        ["--weight-transfer-config", "are slots"],
    ),
    "lora": ({"enable_lora": True}, ["--enable-lora", "adapters belong to experts"]),
    "pipeline_parallel": (
        {"pipeline_parallel_size": 2},
        ["--pipeline-parallel-size 2", "use --tensor-parallel-size instead"],
    ),
    "data_parallel": (
        {"data_parallel_size": 2},
        ["--data-parallel-size 2", "one server per replica"],
    ),
    "speculative_decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ["--speculative-config", "ngram", "leave speculative decoding out"],
    ),
    "expert_parallel": (
        {"enable_expert_parallel": True},
        ["--enable-expert-parallel", "use --tensor-parallel-size alone"],
    ),
    "elastic_expert_parallel": ({"enable_elastic_ep": True}, ["--enable-elastic-ep"]),
    "microbatches": ({"ubatch_size": 2}, ["--ubatch-size 2"]),
    "sleep_mode": ({"enable_sleep_mode": True}, ["--enable-sleep-mode"]),
}


@pytest.mark.parametrize("name", EXPERTS_ARGUMENTS)
def test_arguments_that_experts_refuse_before_vllm_does_anything(
    make_engine_args, monkeypatch, name
):
    fields, expected = EXPERTS_ARGUMENTS[name]
    tiered = {"kv": {"enabled": False}, "experts": {"near_gib": 1}}
    engine_args = make_engine_args(additional_config={"tiered": tiered}, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError) as refused:
        engine_args.create_engine_config()
    for part in [*expected, "experts in slots", "or leave tiered.experts.near_gib out"]:
        assert part in str(refused.value)


EXPERTS_MODELS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "speculative_decoding": ({}, SimpleNamespace(method="mtp"), "speculative decoding (mtp)"),
}


@pytest.mark.parametrize("name", EXPERTS_MODELS)
def test_models_that_experts_refuse(name):
    changes, speculation, expected = EXPERTS_MODELS[name]
    config = config_of({"quantization": None, "is_moe": True, **changes}, speculation)
    with pytest.raises(UnsupportedError, match=r"or leave tiered\.experts\.near_gib") as refused:
        checks.check_vllm_config(Part.EXPERTS, config)
    assert expected in str(refused.value)


def test_experts_run_on_cpus_and_nvidias_gpus():
    for device in ("cpu", "cuda"):
        checks.check_device(Part.EXPERTS, device)
    with pytest.raises(UnsupportedError, match=r'device is "xpu": leave tiered\.experts'):
        checks.check_device(Part.EXPERTS, "xpu")


def test_nothing_is_checked_with_kv_switched_off(make_engine_args):
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
def test_arguments_that_are_compatible(make_engine_args, fields):
    engine_args = make_engine_args(additional_config=ON, **fields)
    checks.check_engine_args(Part.KV, engine_args)


GENERATE = {
    "runner_type": "generate",
    "model": "org/model",
    "is_encoder_decoder": False,
    "is_attention_free": False,
    "is_hybrid": False,
    "use_mla": False,
}

KV_MODELS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "pooling": ({"runner_type": "pooling"}, None, "runner type 'pooling'"),
    "encoder_decoder": ({"is_encoder_decoder": True}, None, "org/model (encoder-decoder)"),
    "attention_free": ({"is_attention_free": True}, None, "org/model (attention-free)"),
    "captured_kv_updates": ({"captures": "PIECEWISE"}, None, "--compilation-config"),
    "drafts_in_a_pipeline": (
        {"stages": 2},
        SimpleNamespace(method="ngram"),
        "speculative decoding (ngram) on 2 stages",
    ),
}


def config_of(fields, speculative_config=None):
    fields = GENERATE | {"window": None, "layer_types": None, "captures": "NONE"} | fields
    stages = fields.pop("stages", 1)
    window, layer_types, mode = (fields.pop(name) for name in ("window", "layer_types", "captures"))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **fields,
            hf_text_config=SimpleNamespace(layer_types=layer_types),
            get_sliding_window=lambda: 4096,
            get_total_num_hidden_layers=lambda: 30,
        ),
        cache_config=SimpleNamespace(sliding_window=window),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(
                name=mode, has_piecewise_cudagraphs=lambda: "PIECEWISE" in mode
            ),
            splitting_ops_contain_kv_cache_update=lambda: False,
        ),
        speculative_config=speculative_config,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


@pytest.mark.parametrize("name", KV_MODELS)
def test_models_that_kv_refuses(name):
    fields, speculation, expected = KV_MODELS[name]
    with pytest.raises(UnsupportedError) as refused:
        checks.check_vllm_config(Part.KV, config_of(fields, speculation))
    assert expected in str(refused.value)
    assert "What to do:" in str(refused.value)


def test_a_plain_decoder_is_compatible(monkeypatch):
    checks.check_vllm_config(Part.KV, config_of({"layer_types": ["full_attention"]}))
    checks.check_vllm_config(Part.KV, config_of({"captures": "FULL_DECODE_ONLY"}))
    checks.check_vllm_config(Part.KV, config_of({"stages": 2}))
    config = config_of({"layer_types": ["sliding_attention"]})
    config.model_config.get_sliding_window = lambda: None  # --disable-sliding-window
    checks.check_vllm_config(Part.KV, config)
    config = config_of({"captures": "FULL_AND_PIECEWISE"})
    config.compilation_config.splitting_ops_contain_kv_cache_update = lambda: True
    checks.check_vllm_config(Part.KV, config)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(UnsupportedError, match="VLLM_USE_BREAKABLE_CUDAGRAPH"):
        checks.check_vllm_config(Part.KV, config)


def test_the_split_of_graphs_is_asked_for_as_vllm_names_it():
    from vllm.config import CompilationConfig

    compilation = CompilationConfig()
    assert compilation.splitting_ops_contain_kv_cache_update()
    compilation.splitting_ops = ["vllm::unified_attention"]
    assert not compilation.splitting_ops_contain_kv_cache_update()


TESTED: dict[Part, tuple[dict[str, Any], dict[str, Any]]] = {
    Part.KV: (KV_ARGUMENTS, KV_MODELS),
    Part.WEIGHTS: (WEIGHTS_ARGUMENTS, WEIGHTS_MODELS),
    Part.EXPERTS: (EXPERTS_ARGUMENTS, EXPERTS_MODELS),
    Part.FFN: (FFN_ARGUMENTS, FFN_MODELS),
}


@pytest.mark.parametrize("part", TESTED, ids=lambda part: part.value)
def test_every_check_is_tested(part):
    tables = (checks.ENGINE_ARGS_CHECKS, checks.VLLM_CONFIG_CHECKS)
    for table, tested in zip(tables, TESTED[part], strict=True):
        features = {check.feature for check in table if part in check.conflicts}
        assert {name.partition(":")[0] for name in tested} == features


@pytest.mark.parametrize(
    "check",
    (*checks.ENGINE_ARGS_CHECKS, *checks.VLLM_CONFIG_CHECKS),
    ids=lambda check: check.feature,
)
def test_every_check_can_be_a_row_of_the_support_matrix(check):
    assert re.fullmatch(r"[a-z0-9_]+", check.feature)
    assert check.conflicts
    for conflict in check.conflicts.values():
        assert conflict.reason and not conflict.reason.endswith(".")
        assert conflict.remedy and not conflict.remedy.endswith(".")


def test_the_model_fields_are_vllms_own(make_engine_args):
    model_config = make_engine_args().create_model_config()
    assert {name: getattr(model_config, name) for name in GENERATE} == GENERATE | {
        "model": model_config.model
    }


def test_a_second_configuration_begins_as_the_first(make_engine_args, monkeypatch):
    """vLLM writes the folder of a model from elsewhere into the arguments."""
    from vllm.config import ModelConfig

    seen = []
    create = ModelConfig.__post_init__

    def note(self, *args, **kwargs):
        seen.append(self.model)
        create(self, *args, **kwargs)
        self.model = f"{self.model}/."

    monkeypatch.setattr(ModelConfig, "__post_init__", note)
    engine_args = make_engine_args(additional_config=ON, runner="pooling", convert="embed")
    given = engine_args.model
    engine_args.create_engine_config()
    assert seen == [given] * 2
    assert engine_args.model == f"{given}/."


def test_a_pooling_model_is_known_when_vllm_has_read_it(make_engine_args):
    pooling = {"runner": "pooling", "convert": "embed"}
    with pytest.raises(UnsupportedError, match="runner type 'pooling'"):
        make_engine_args(additional_config=BY_HAND, **pooling).create_engine_config()
    plain = make_engine_args(**pooling).create_engine_config()
    config = make_engine_args(additional_config=ON, **pooling).create_engine_config()
    assert config.kv_transfer_config is None
    assert "runner type 'pooling'" in config.additional_config["tiered_steps_aside"]["kv"]
    assert config.compilation_config == plain.compilation_config


def test_other_devices_are_left_to_vllm(make_engine_args, monkeypatch):
    monkeypatch.setattr(engine_config, "device_type", lambda: "xpu")
    config = make_engine_args(additional_config=ON).create_engine_config()
    assert 'device is "xpu"' in config.additional_config["tiered_steps_aside"]["kv"]
    with pytest.raises(UnsupportedError, match=r'device is "xpu": set tiered\.kv\.enabled'):
        make_engine_args(additional_config=BY_HAND).create_engine_config()
