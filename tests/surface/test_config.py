# SPDX-License-Identifier: Apache-2.0
"""The frozen surface: a change here breaks users' configurations and needs the changelog."""

import inspect

import pytest

from vllm_tiered import config, errors
from vllm_tiered.config import ExpertsConfig, FfnConfig, KvConfig, TieredConfig, WeightsConfig


def test_keys_and_defaults():
    assert TieredConfig().to_dict() == {
        "kv": {
            "enabled": True,
            "far_gib": "auto",
            "expansion": "auto",
            "max_expansion": 4.0,
            "policy": "interleave",
            "tier": "far",
            "path": None,
            "far_dtype": "auto",
            "verify": "off",
            "prefix_store": "auto",
        },
        "weights": {
            "placement": "off",
            "near_gib": "auto",
            "far_gib": "auto",
            "storage_path": None,
            "compress": "none",
            "percents": None,
            "prompt_tokens": "auto",
        },
        "experts": {
            "near_gib": "auto",
            "far_gib": "auto",
            "storage_path": None,
            "policy": "lfu",
            "prefetch": "off",
            "fallback": "none",
            "fallback_share": 0.25,
        },
        "ffn": {
            "store": None,
            "mix": "auto",
            "window": 4,
            "exact": False,
            "prefill": "auto",
            "deterministic": False,
            "cache": "atu",
            "preload": "auto",
            "near_gib": "auto",
            "far_gib": "auto",
        },
        "l2": {"prefetch": "auto", "budget_mib": "auto"},
        "report": {
            "path": None,
            "carbon_intensity": 820.0,
            "embodied_kg": 0.0,
            "lifetime_years": 5.0,
        },
    }


@pytest.mark.parametrize("policy", ["interleave", "on_demand"])
def test_policies(policy):
    assert KvConfig(policy=policy).policy == policy


@pytest.mark.parametrize(
    "placement", ["off", "flexgen", "helm", "all_far", "latency", "throughput", "auto"]
)
def test_placements(placement):
    assert WeightsConfig(placement=placement).placement == placement


def test_key_in_additional_config():
    assert config.ROOT_KEY == "tiered"


def test_error_tree():
    """Users catch these errors, and the builtins they derive from, by name."""
    classes = {
        name: tuple(base.__name__ for base in cls.__bases__)
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__
    }
    assert classes == {
        "TieredError": ("Exception",),
        "ConfigError": ("TieredError", "ValueError"),
        "UnsupportedError": ("TieredError", "ValueError"),
        "BudgetError": ("TieredError", "ValueError"),
        "VersionError": ("TieredError", "RuntimeError"),
        "IntegrityError": ("TieredError", "RuntimeError"),
    }


def test_the_docstring_draws_the_tree():
    drawn = errors.__doc__ or ""
    for name, cls in inspect.getmembers(errors, inspect.isclass):
        assert f"{name} " in drawn or f"{name}\n" in drawn
        assert all(f"(+ {base.__name__})" in drawn for base in cls.__bases__[1:])


def test_a_mix_is_three_shares():
    assert FfnConfig.from_dict({"mix": "[0.25, 0.25, 0.5]"}).mix == (0.25, 0.25, 0.5)
    for wrong in ([0.5, 0.5], [0.5, 0.5, 0.5], [-0.1, 0.5, 0.5], [0, 0, 0], "half"):
        with pytest.raises(errors.ConfigError, match=r"tiered\.ffn\.mix"):
            FfnConfig.from_dict({"mix": wrong})


def test_experts_without_slots_or_a_place_are_refused():
    with pytest.raises(errors.ConfigError, match=r"experts\.policy is 'lru', but all experts stay"):
        ExpertsConfig(policy="lru").check()
    with pytest.raises(errors.ConfigError, match=r"fallback_share is 0.1, and .*fallback to"):
        ExpertsConfig(near_gib=1, fallback_share=0.1).check()
    with pytest.raises(errors.ConfigError, match=r"far_gib is 2, and there is no place .* an SSD"):
        ExpertsConfig(near_gib=1, far_gib=2).check()
    ExpertsConfig(near_gib=1, far_gib=2, storage_path="/ssd").check()
    assert not ExpertsConfig().is_used and ExpertsConfig(near_gib=1).is_used


def test_an_ffn_without_a_store_is_refused():
    with pytest.raises(errors.ConfigError, match=r"ffn\.exact is True, .* set tiered\.ffn\.store"):
        FfnConfig(exact=True).check()
    with pytest.raises(errors.ConfigError, match="no mix"):
        FfnConfig(store="/s", exact=True, mix=(1, 0, 0)).check()
    with pytest.raises(errors.ConfigError, match=r"window .* whole number >= 1"):
        FfnConfig(window=0)
