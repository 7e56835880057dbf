# SPDX-License-Identifier: Apache-2.0
"""How many of the models in vLLM's recipes each part takes: what is asked, and what is counted."""

import sys
from typing import Any

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.recipes import FAMILIES, Recipe, recipes
from benchmarks.suites.support import models

TAKEN: dict[str, Any] = {
    "problem": None,
    "is_refused": False,
    "no_plan": None,
    "kv": None,
    "kv_v2": None,
    "weights": None,
    "experts": None,
    "ffn": None,
}


def recipe(family: str, *, is_mixture: bool = False, precisions: tuple[str, ...] = ("bf16",)):
    return Recipe(
        model=f"org/{family}",
        is_mixture=is_mixture,
        precisions=precisions,
        family=family,
        is_of_this_year=family != "llama",
    )


def test_every_recipe_has_a_family_and_every_family_a_recipe():
    rows = recipes()
    assert len(rows) == len({row.model for row in rows}) == 146
    assert {row.family for row in rows} == set(FAMILIES)
    assert sum(row.is_of_this_year for row in rows) == 74


def test_shares():
    said = {
        "llama": TAKEN | {"experts": "it has no experts"},
        "qwen3_moe": TAKEN | {"weights": "a mixture", "kv_v2": "states", "no_plan": "no kernel"},
        "glm4": TAKEN | {"problem": "no such class"},
    }
    rows = [recipe("llama"), recipe("qwen3_moe", is_mixture=True), recipe("glm4")]
    result = models.summarise(rows, said)
    assert set(models.RESULT_KEYS) <= result.keys()
    assert result["kv_share"] == pytest.approx(2 / 3)
    assert (result["kv_share_this_year"], result["kv_share_this_year_v2"]) == (0.5, 0)
    assert (result["weights_share_this_year"], result["experts_share_of_mixtures"]) == (0, 1)
    assert (result["servers_refused"], result["not_planned_this_year"]) == (0, 1)
    text = models.table(result)
    assert "| `Glm4ForCausalLM` | 1 | - | - | - | - | - | no such class |" in text
    assert "| `LlamaForCausalLM` | 1 | yes | yes | yes | - | yes |  |" in text


def test_weights_are_placed_in_the_formats_that_were_tried():
    rows = [recipe("qwen3", precisions=("nvfp4",)), recipe("qwen3", precisions=("fp8", "nvfp4"))]
    result = models.summarise(rows, {"qwen3": TAKEN})
    assert (result["weights_share_this_year"], result["kv_share_this_year"]) == (0.5, 1)


def test_a_server_that_the_plugin_refuses_is_counted():
    said = {"qwen3": {"problem": "refused", "is_refused": True}}
    assert models.summarise([recipe("qwen3")], said)["servers_refused"] == 1


def test_real_classes_are_asked():
    """A hybrid is taken by both model runners, as are layers that share a KV cache.

    vLLM's plans of their KV caches are asked, where its CPU backend makes one.
    """
    said: list[str] = []
    settings = models.Settings(families=("llama", "qwen3_next", "gemma4_e", "kimi_linear"))
    result = models.run(settings, said.append)
    assert len(said) == models.num_steps(settings) == 4
    families = result["families"]
    assert families["llama"]["kv"] is families["llama"]["kv_v2"] is None
    assert families["qwen3_next"]["kv"] is families["qwen3_next"]["kv_v2"] is None
    assert families["gemma4_e"]["kv"] is families["gemma4_e"]["kv_v2"] is None
    planned = [name for name, found in families.items() if found["no_plan"] is None]
    assert planned == ["llama", "qwen3_next", "gemma4_e"]
    assert "not supported by attention backend(s): CPU_MLA" in families["kimi_linear"]["no_plan"]


def test_an_obstacle_in_the_plan_is_found(monkeypatch):
    """What the layers let pass, the plan may not."""
    from benchmarks.suites.support import families

    said = {"kv": None, "kv_v2": "states", "no_plan": None}
    monkeypatch.setattr(families, "_obstacle_of_plan", lambda config: "pages lie apart")
    families._ask_plan(None, said)
    assert said == {"kv": "pages lie apart", "kv_v2": "states", "no_plan": None}


def test_a_process_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MeasurementError, match="ended with 1 at family llama"):
        models.run(models.Settings(families=("llama",)), lambda text: None)
