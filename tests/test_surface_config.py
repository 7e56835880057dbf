# SPDX-License-Identifier: Apache-2.0
"""The frozen surface: a change here breaks users' configurations and needs the changelog."""

import inspect

import pytest

from vllm_tiered import config, errors
from vllm_tiered.config import KvConfig, TieredConfig, WeightsConfig


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
            "verify": "off",
        },
        "weights": {
            "placement": "off",
            "near_gib": "auto",
            "far_gib": "auto",
            "storage_path": None,
            "compress": "none",
            "percents": None,
        },
        "ffn": {
            "store": None,
            "mix": "auto",
            "window": 4,
            "exact": False,
            "cache": "atu",
            "near_gib": "auto",
            "far_gib": "auto",
        },
        "report": {"path": None, "carbon_intensity": 820.0},
    }


@pytest.mark.parametrize("policy", ["interleave", "fifo", "on_demand"])
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
    """Users catch these, and the builtins beside them, by name."""
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
