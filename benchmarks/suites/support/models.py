# SPDX-License-Identifier: Apache-2.0
"""How many of the models that people serve each part of the plugin takes.

The models are those of vLLM's own recipes that generate text. Each stands for a family of vLLM's
model classes (`benchmarks/inputs/recipes.py`), whose default configuration vLLM reads here, with
the plugin on its defaults. What the plugin then says is counted: its checks of the configuration,
and its look at the layers of the model, built without weights. Nothing is computed.

A family that this vLLM cannot make an engine of here counts as not taken. Weights and the FFN are
counted where the recipe has a variant that they take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown
from benchmarks.inputs.recipes import FAMILIES, Recipe, recipes
from benchmarks.peers import PREFIX

RESULT_KEYS = (
    "kv_share",
    "kv_share_this_year",
    "kv_share_this_year_v2",
    "weights_share_this_year",
    "experts_share_of_mixtures",
    "servers_refused",
    "not_planned_this_year",
    "families",
    "definitions",
)
DEFINITIONS = {
    "kv_share": "share of all models whose KV cache is swapped",
    "kv_share_this_year": "the same of models that need vLLM 0.15 or later",
    "kv_share_this_year_v2": "the same under model runner V2, which a GPU has by default",
    "weights_share_this_year": "share of those whose weights can be placed, in a published variant"
    " of 16 bit, FP8, int8 or int4",
    "experts_share_of_mixtures": "share of all mixtures whose experts can be kept in slots",
    "servers_refused": "models of which vLLM makes an engine's configuration without the plugin, "
    "and not with its defaults",
    "not_planned_this_year": "models counted in kv_share_this_year of whose KV caches vLLM makes no"
    " plan on a CPU, so that only their layers were looked at",
    "families": "by family: models, and what each part says; null where it takes part",
}
_PARTS = ("kv", "kv_v2", "weights", "experts", "ffn")
_NEEDED: Mapping[str, frozenset[str]] = {
    "kv": frozenset(),
    "kv_v2": frozenset(),
    "weights": frozenset(("bf16", "fp8", "int8", "int4")),
    "experts": frozenset(),
    "ffn": frozenset(("bf16",)),
}
"""Precisions of which a model has to have a variant, for each part; none: any will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile: the families to look at, all if none is named."""

    families: tuple[str, ...] = ()


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(families=("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5")),
    "full": Settings(),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return len(settings.families or FAMILIES)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Ask for each family; see the module's docstring."""
    names = settings.families or tuple(FAMILIES)
    with tempfile.TemporaryDirectory() as folder:
        said = _ask(folder, names, step)
    models = [recipe for recipe in recipes() if recipe.family in said]
    return summarise(models, said)


def _ask(folder: str, names: tuple[str, ...], step: Step) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.suites.support.families", folder, *names]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    said: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(
        command,
        cwd=REPO_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(PREFIX):
                found = json.loads(line.removeprefix(PREFIX))
                said[found["family"]] = found
                step(f"{found['family']}: {found['problem'] or found['kv'] or 'KV is swapped'}")
    if len(said) != len(names):
        missing = next(name for name in names if name not in said)
        raise MeasurementError(f"the process ended with {process.returncode} at family {missing}")
    return said


def summarise(models: list[Recipe], said: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result from what the parts said by family."""
    this_year = [model for model in models if model.is_of_this_year]
    mixtures = [model for model in models if model.is_mixture]

    def share(part: str, of: list[Recipe]) -> float | None:
        taken = [model for model in of if _is_taken(part, model, said[model.family])]
        return len(taken) / len(of) if of else None

    families = {
        name: {
            "models": sum(model.family == name for model in models),
            **{key: found.get(key) for key in ("problem", "no_plan", *_PARTS)},
        }
        for name, found in said.items()
    }
    return {
        "kv_share": share("kv", models),
        "kv_share_this_year": share("kv", this_year),
        "kv_share_this_year_v2": share("kv_v2", this_year),
        "weights_share_this_year": share("weights", this_year),
        "experts_share_of_mixtures": share("experts", mixtures),
        "servers_refused": sum(bool(said[model.family]["is_refused"]) for model in models),
        "not_planned_this_year": sum(
            _is_taken("kv", model, said[model.family]) and bool(said[model.family].get("no_plan"))
            for model in this_year
        ),
        "num_models": len(models),
        "num_models_this_year": len(this_year),
        "num_mixtures": len(mixtures),
        "families": families,
        "definitions": DEFINITIONS,
    }


def _is_taken(part: str, model: Recipe, found: Mapping[str, Any]) -> bool:
    if found["problem"] or found[part]:
        return False
    return not _NEEDED[part] or bool(_NEEDED[part] & set(model.precisions))


def table(result: Mapping[str, Any]) -> str:
    """Return the families as a Markdown table: what takes part, and why the KV cache is not."""
    rows = []
    for name, family in sorted(result["families"].items()):
        taken = ["-" if family["problem"] or family[part] else "yes" for part in _PARTS]
        why = family["problem"] or family["kv_v2"] or ""
        rows.append((f"`{FAMILIES[name].architecture}`", str(family["models"]), *taken, why))
    return markdown(("vLLM's class", "models", *_PARTS, "why the KV cache is vLLM's own"), rows)
