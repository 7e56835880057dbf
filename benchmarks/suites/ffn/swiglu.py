# SPDX-License-Identifier: Apache-2.0
"""M2Cache's comparison on a trained model: the demo model (SwiGLU), with neurons ranked by `base4`.

This model has no synthetic sparsity. No neuron of a SwiGLU is ever inactive: the mix sets the
precision of each, and perplexity shows the cost. Either near and far memory together hold as many
bytes as the dense FFN, or near memory alone holds a tenth less; both count the 4-bit base, staging
and tables. What is in neither is read from the disk, past the page cache. Streamed layers keep only
staging and the embeddings near. Each round has its own prompt, a ShareGPT question.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root
from benchmarks.harness.memory_limit import drop_cached
from benchmarks.harness.out_of_core import KV_BLOCK_TOKENS
from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.model import demo_model_dir
from benchmarks.suites.ffn.cached_ffn import CachedMixedFfn
from benchmarks.suites.ffn.quality_variants import GROUP, HELD_OUT, PAPERS
from vllm_tiered.ffn.prepare.evaluate import Variant, by_base4, evaluate
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel
from vllm_tiered.ffn.prepare.pipeline import prepare
from vllm_tiered.ffn.prepare.texts import calibration_texts
from vllm_tiered.ffn.selection import ALL

__all__ = ["PROFILES", "RESULT_KEYS", "num_steps", "run", "table"]

MIXED = "mixed, near + far + storage"
FROM_DISK = "mixed, near + storage"
LAYERS = "layer streaming"
DENSE = "vLLM, all in memory"
CONTENDERS = (MIXED, FROM_DISK, LAYERS, DENSE)

RESULT_KEYS = (
    "speedup_vs_layer_streaming",
    "ratio_to_dense",
    "perplexity_ratio",
    "perplexity",
    "by_contender",
    "definitions",
)

DEFINITIONS = {
    "speedup_vs_layer_streaming": "tokens/s of one request with mixed neurons over those of all"
    " layers' weights read from the disk for each token; median of rounds' ratios",
    "ratio_to_dense": "the same over vLLM with all weights in memory",
    "perplexity": "of ShareGPT text in full precision, and with all tokens mixed, where near memory"
    " holds twice the neurons that a token wants (the engine here has less, and computes in full"
    " precision where it prefers dense steps: sparse_share)",
    "perplexity_ratio": "the second over the first",
    "sparse_share": "of layers' decode steps, those computed from chosen neurons",
    "hit_ratio": "of the neurons wanted in 16 or 8 bit, those near; the base, always near, not",
}

_PROMPT_TOKENS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        near_share, far_share: shares of the dense FFN's bytes, for the near neurons with all that
            they need and for the far ones.
        text_tokens: number of tokens that perplexity is computed on.
        folder: where the store is kept, on the disk under test ("": the cache folder).
    """

    rounds: int
    new_tokens: int
    text_tokens: int
    near_share: float = 0.9
    far_share: float = 0.1
    cache: str = "atu"
    threads: int = 2
    folder: str = ""


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(rounds=2, new_tokens=48, text_tokens=400),
    "full": Settings(rounds=5, new_tokens=128, text_tokens=3000),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 2 + settings.rounds * len(CONTENDERS)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = demo_model_dir()
    store = folder / f"{model.name}-store"
    prepare(model, store)
    step(f"neuron store: {store}")
    # One text per conversation; its prompt is at most half of it.
    questions = calibration_texts(
        model,
        2 * _PROMPT_TOKENS * settings.rounds,
        tokens_per_text=2 * _PROMPT_TOKENS,
        skip=HELD_OUT,
    )
    rounds: list[dict[str, dict[str, Any]]] = []
    for index, question in enumerate(questions[: settings.rounds]):
        prompt = question.token_ids[: question.num_given]
        commands = contenders(settings, model, store, folder, prompt)
        if not rounds:  # the file of streamed layers is made before anything is measured
            memory_capped.measure(LAYERS, commands[LAYERS], None, settings.threads)
        result: dict[str, dict[str, Any]] = {}
        for name in CONTENDERS[:: 1 if index % 2 == 0 else -1]:
            drop_cached([folder])
            result[name] = memory_capped.measure(name, commands[name], None, settings.threads)
            step(f"{name}: {memory_capped.tokens_per_s(result[name]):.2f} tokens/s")
        rounds.append(result)
    perplexity = _perplexity(model, settings.text_tokens)
    step(f"perplexity {perplexity['mixed']:.3f} for {perplexity['full']:.3f}")
    return summarise(rounds, perplexity) | {"definitions": DEFINITIONS}


def contenders(
    settings: Settings, model: Path, store: Path, folder: Path, prompt: Sequence[int]
) -> dict[str, list[str]]:
    """Return each contender's command line by name."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    load = memory_capped.Load(prompt_tokens=len(prompt), new_tokens=settings.new_tokens)
    head_bytes = 2 * config["hidden_size"] // config["num_attention_heads"]
    row_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_bytes
    num_blocks = 1 - (-(len(prompt) + settings.new_tokens) // KV_BLOCK_TOKENS)
    kv_bytes = num_blocks * KV_BLOCK_TOKENS * row_bytes
    ffn_bytes = (
        6 * config["num_hidden_layers"] * config["hidden_size"] * config["intermediate_size"]
    )

    def command(tiered: Mapping[str, Any] | None) -> list[str]:
        prompt_ids = json.dumps(list(prompt))
        return memory_capped.decode_command(load, model, kv_bytes, tiered, "--prompt", prompt_ids)

    def mixed(far_share: float) -> list[str]:
        ffn = {
            "store": str(store),
            "mix": list(PAPERS.shares),
            "cache": settings.cache,
            "near_gib": settings.near_share * ffn_bytes / 2**30,
            "far_gib": far_share * ffn_bytes / 2**30,
        }
        return command({"ffn": ffn})

    streamed = {
        "placement": "flexgen",
        "percents": [0, 0, 100],
        "far_gib": 0,
        "storage_path": str(folder / f"{model.name}-layers"),
    }
    return {
        MIXED: mixed(settings.far_share),
        FROM_DISK: mixed(0.0),
        LAYERS: command({"weights": streamed}),
        DENSE: command(None),
    }


def summarise(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]], perplexity: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of all rounds."""
    rates = {name: [memory_capped.tokens_per_s(r[name]) for r in rounds] for name in CONTENDERS}

    def ratio(other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[MIXED], rates[other], strict=True))

    def a_token(name: str, key: str) -> float:
        return statistics.median(
            float(r[name]["use"].get(key, 0.0)) / len(r[name]["seconds_per_token"]) for r in rounds
        )

    by_contender = {}
    for name in CONTENDERS:
        hits, misses = a_token(name, "ffn_hits"), a_token(name, "ffn_misses")
        sparse, dense = a_token(name, "ffn_sparse_steps"), a_token(name, "ffn_dense_steps")
        by_contender[name] = {
            "tokens_per_s": statistics.median(rates[name]),
            "tokens_per_s_by_round": rates[name],
            "hit_ratio": hits / (hits + misses) if hits + misses else None,
            "sparse_share": sparse / (sparse + dense) if sparse + dense else None,
            "storage_bytes": a_token(name, "ffn_storage_bytes"),
            "far_bytes": a_token(name, "ffn_far_bytes"),
        }
    return {
        "speedup_vs_layer_streaming": ratio(LAYERS),
        "ratio_to_dense": ratio(DENSE),
        "perplexity": dict(perplexity),
        "perplexity_ratio": perplexity["mixed"] / perplexity["full"],
        "by_contender": by_contender,
        "manifest": rounds[-1][MIXED]["manifest"],
    }


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each contender."""
    rows = [
        [
            name,
            number(figures["tokens_per_s"], 2),
            *(
                "-" if figures[key] is None else number(100 * figures[key], 0)
                for key in ("hit_ratio", "sparse_share")
            ),
            number(figures["storage_bytes"] / 1e6, 1),
            number(figures["far_bytes"] / 1e6, 1),
        ]
        for name, figures in result["by_contender"].items()
    ]
    headings = ["demo model", "tokens/s", "hits %", "sparse %", "MB from disk", "MB from far"]
    perplexity = result["perplexity"]
    return (
        f"{markdown(headings, rows)}\n\nPerplexity {number(perplexity['mixed'], 3)} with the mix,"
        f" {number(perplexity['full'], 3)} in full precision."
    )


def _perplexity(model: Path, num_tokens: int) -> dict[str, float]:
    texts = calibration_texts(model, num_tokens, skip=HELD_OUT)
    mixed = Variant(mix=PAPERS, group=GROUP, ranking=by_base4, ffn=CachedMixedFfn)
    variants = {"full": Variant(mix=ALL, group=GROUP), "mixed": mixed}
    outcomes = evaluate(LayerwiseModel(model), texts, variants)
    return {name: outcome.perplexity for name, outcome in outcomes.items()}
