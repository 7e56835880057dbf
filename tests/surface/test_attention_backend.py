# SPDX-License-Identifier: Apache-2.0
"""Choice of an attention backend, where vLLM's own choice stands in the way of KV swapping."""

import pytest
import torch

from vllm_tiered.adapter.kv import attention_backend


@pytest.fixture
def platform(monkeypatch):
    """A platform that prefers FLEX_ATTENTION, and takes what it is told if it is in the list."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention_backend.install()
    monkeypatch.setattr(attention_backend, "_said", set())
    takes = ["FLEX_ATTENTION", "TRITON_ATTN"]

    def choose(cls, selected_backend, attn_selector_config, num_heads=None):
        name = selected_backend.name if selected_backend else "FLEX_ATTENTION"
        if name not in takes:
            raise ValueError(f"Selected backend {name} is not valid for this configuration")
        return AttentionBackendEnum[name].get_path()

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(choose))
    cached = selector._cached_get_attn_backend.__vllm_tiered_wrapped__
    cached.cache_clear()
    yield takes
    cached.cache_clear()


@pytest.fixture
def chosen(make_engine_args, platform):
    """Return the name of the backend of one layer under an engine's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    def choose(config, **layer):
        with set_current_vllm_config(config):
            return get_attn_backend(64, torch.bfloat16, "auto", **layer).get_name()

    return choose


def test_the_next_that_can_be_translated_is_taken_and_said_once(
    chosen, make_engine_args, caplog_vllm
):
    config = make_engine_args(additional_config={"tiered": {}}).create_engine_config()
    assert [chosen(config), chosen(config)] == ["TRITON_ATTN"] * 2
    lines = [r.getMessage() for r in caplog_vllm.records if "TRITON_ATTN" in r.getMessage()]
    assert len(lines) == 1
    assert "--attention-backend FLEX_ATTENTION the KV part steps aside" in lines[0]


@pytest.mark.parametrize(
    ("additional", "backend"),
    [
        pytest.param({}, None, id="the_plugin_is_off"),
        pytest.param({"tiered": {"kv": {"enabled": False}}}, None, id="the_part_is_off"),
        pytest.param({"tiered": {}}, "FLEX_ATTENTION", id="the_user_named_one"),
    ],
)
def test_vllms_choice_stands(chosen, make_engine_args, additional, backend):
    config = make_engine_args(
        additional_config=additional, attention_backend=backend
    ).create_engine_config()
    assert chosen(config) == "FLEX_ATTENTION"


def test_vllms_choice_stands_where_the_part_stepped_aside(chosen, make_engine_args):
    config = make_engine_args(
        additional_config={"tiered": {}}, kv_offloading_size=4.0
    ).create_engine_config()
    assert chosen(config) == "FLEX_ATTENTION"


def test_vllms_choice_stands_for_layers_that_are_not_swapped(chosen, make_engine_args):
    config = make_engine_args(additional_config={"tiered": {}}).create_engine_config()
    assert chosen(config, attn_type="encoder_only") == "FLEX_ATTENTION"
    assert chosen(config, use_mla=True) == "FLEX_ATTENTION"


def test_vllms_choice_stands_if_no_other_fits(chosen, make_engine_args, platform):
    platform.remove("TRITON_ATTN")
    config = make_engine_args(additional_config={"tiered": {}}).create_engine_config()
    assert chosen(config) == "FLEX_ATTENTION"
