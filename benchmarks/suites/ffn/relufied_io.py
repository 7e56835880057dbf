# SPDX-License-Identifier: Apache-2.0
"""Reads of a token's FFN by technique, with a trained ReLU model's activity (LLM in a flash, 2).

The activity is the trained ReLU model's, repeated to the size of OPT-6.7B
(`inputs/relufied_activity.py`); the bytes are random, in a file of that size. A token needs the
neurons that the gate in 4 bit names, which stays near too; with `is_predicted=false` those whose
gate exceeds 0, as a predictor without errors and without size would name them. All reads bypass the
page cache and scattered ones are verified; nothing is computed. A layer's cache has the slots that
the layer needs, as the engine's have.

    streamed                all matrices
    active                  each active neuron's row and column, apart; nothing is kept
    window                  the same, beside the neurons of the last tokens
    window, bundled         row and column in one read
    last token              bundled, beside the last token's neurons alone (`atu`)
    last token, co-active   the same, neurons that become active together side by side
    ..., holes to n KiB     the same two, a request reads over holes and drops what is there
    streamed beside ...     all that a technique's near bytes do not hold, of whole matrices
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.cache import cache_root
from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.relufied_activity import Activity, relufied_activity
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES
from benchmarks.suites.ffn.flash_files import Matrices
from benchmarks.suites.ffn.flash_random import Bundles, random_files
from benchmarks.suites.ffn.flash_replay import (
    Apart,
    Bundled,
    Technique,
    Token,
    Whole,
    capacities_for,
    tokens_of,
)
from benchmarks.suites.ffn.flash_summary import mean_cost

RESULT_KEYS = ("speedup", "active_share", "by_technique", "ffn_bytes", "is_direct", "definitions")

STREAMED, ACTIVE, WINDOW, BUNDLED, LAST, CO_ACTIVE = (
    "streamed",
    "active",
    "window",
    "window, bundled",
    "last token, bundled",
    "last token, co-active",
)
_BESIDE = "streamed beside "

PREDICTOR_SHARE = 0.5625 / 4
"""Of a row and a column in 16 bit: the row's codes in 4 bit, and two sets of scales for 64."""

DEFINITIONS = {
    "speedup": "read seconds of streaming what the same near memory does not hold, over the"
    " technique's; median over rounds of each round's ratio",
    "active_share": "of the neurons, as they are named, over layers and tokens",
    "by_technique": "a token's read and cache seconds, bytes read, and requests to the disk,"
    " medians over rounds of means over tokens; near_share: of the FFN's bytes, what stays in"
    " memory",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        shape: a name of `benchmarks.inputs.synthetic_sparsity.model.SYNTHETIC_SHAPES`.
        tokens: replayed and counted, after `window` tokens that are not.
        dense_tokens: for techniques that read everything; their tokens cost the same.
        steps: of the model's training.
        is_predicted: as a real predictor names neurons.
        holes_kib: longest holes to read over.
        folder: where the file is kept, on the disk under test ("": the cache folder).
    """

    shape: str = "opt-6.7b"
    rounds: int = 2
    tokens: int = 6
    dense_tokens: int = 2
    window: int = 5
    steps: int = 600
    is_predicted: bool = True
    holes_kib: tuple[int, ...] = ()
    folder: str = ""


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(shape="opt-1.3b", rounds=2, tokens=4),
    "full": Settings(),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 2 + (8 + 2 * len(settings.holes_kib)) * settings.rounds


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises FileNotFoundError if a package is missing."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    activity = relufied_activity(
        sizes.num_layers,
        sizes.ffn_dim,
        settings.window + settings.tokens,
        training_steps=settings.steps,
        is_predicted=settings.is_predicted,
    )
    share = float(np.mean([of.mean() for of in activity.active]))
    step(f"activity: {share:.1%} of {sizes.ffn_dim} neurons in {sizes.num_layers} layers")
    files, store = random_files(sizes, folder)
    step(f"{files.num_bytes / 1e9:.1f} GB in {folder}")
    stores = {kib: store.with_holes(kib << 10) for kib in settings.holes_kib}
    try:
        rounds, near = _rounds(settings, activity, files, store, stores, step)
        is_direct = store.is_direct
    finally:
        for one in (store, *stores.values()):
            one.close()
    return {
        **summarise(rounds, near, files.num_bytes),
        "active_share": share,
        "ffn_bytes": files.num_bytes,
        "is_direct": is_direct,
        "definitions": DEFINITIONS,
    }


def _rounds(
    settings: Settings,
    activity: Activity,
    files: Matrices,
    store: Bundles,
    stores: Mapping[int, Bundles],
    step: Step,
) -> tuple[list[dict[str, dict[str, float]]], dict[str, int]]:
    """Return each round's cost by technique, and each technique's near bytes."""
    plain, ordered = tokens_of(activity.active), ordered_tokens(activity)
    window = settings.window
    held, last = capacities_for(plain, window), capacities_for(plain, 1)
    near: dict[str, int] = {}
    predictor_bytes = int(PREDICTOR_SHARE * files.num_bytes) if settings.is_predicted else 0

    def beside(name: str) -> tuple[Callable[[], Technique], Sequence[Token]]:
        return (lambda: Whole(files, near[name])), plain

    techniques: dict[str, tuple[Callable[[], Technique], Sequence[Token]]] = {
        STREAMED: (lambda: Whole(files), plain),
        ACTIVE: (lambda: Apart(files, last, 0), plain),
        WINDOW: (lambda: Apart(files, held, window), plain),
        BUNDLED: (lambda: Bundled(store, held, window), plain),
        LAST: (lambda: Bundled(store, last, 0), plain),
        CO_ACTIVE: (lambda: Bundled(store, last, 0), ordered),
        **{
            f"{name}, holes to {kib} KiB": (partial(Bundled, of, last, 0), tokens)
            for kib, of in stores.items()
            for name, tokens in ((LAST, plain), (CO_ACTIVE, ordered))
        },
        _BESIDE + BUNDLED: beside(BUNDLED),
        _BESIDE + LAST: beside(LAST),
    }
    rounds = []
    for number_ in range(settings.rounds):
        result = {}
        for name, (make, tokens) in techniques.items():
            # One at a time, so that only one's cache buffers are in memory.
            technique = make()
            try:
                result[name] = _replay(technique, settings, tokens)
            finally:
                technique.close()
            near[name] = technique.dram_bytes
            near[name] += 0 if isinstance(technique, Whole) else predictor_bytes
            read = result[name]["read_seconds"]
            step(f"round {number_ + 1}/{settings.rounds} {name}: {1000 * read:.0f} ms a token")
        rounds.append(result)
    return rounds, near


def ordered_tokens(activity: Activity) -> list[Token]:
    """Return each token's neurons by their places in the order of co-activity."""
    tokens = tokens_of(activity.active)
    return [
        [np.sort(places[ids]) for places, ids in zip(activity.places, token, strict=True)]
        for token in tokens
    ]


def summarise(
    rounds: Sequence[Mapping[str, Mapping[str, float]]], near: Mapping[str, int], ffn_bytes: int
) -> dict[str, Any]:
    """Return medians over rounds, and ratios to streaming beside the same near bytes."""
    by_technique = {
        name: {key: statistics.median(r[name][key] for r in rounds) for key in rounds[0][name]}
        | {"near_share": near[name] / ffn_bytes}
        for name in rounds[0]
    }
    speedup = {
        name: statistics.median(
            r[_BESIDE + name]["read_seconds"] / r[name]["read_seconds"] for r in rounds
        )
        for name in rounds[0]
        if _BESIDE + name in rounds[0]
    }
    return {"speedup": speedup, "by_technique": by_technique}


def table(result: Mapping[str, Any]) -> str:
    """Return a row a technique."""
    rows = [
        [
            name,
            number(100 * figures["near_share"], 0),
            number(figures["num_bytes"] / 1e9, 3),
            "-" if not figures["num_reads"] else number(figures["num_reads"], 0),
            number(1000 * figures["read_seconds"], 0),
            number(1000 * figures["cache_seconds"], 0),
        ]
        for name, figures in result["by_technique"].items()
    ]
    headings = ["technique", "near, % of the FFN", "read GB", "requests", "I/O ms", "cache ms"]
    return markdown(headings, rows)


def _replay(technique: Technique, settings: Settings, tokens: Sequence[Token]) -> dict[str, float]:
    if isinstance(technique, Whole):
        return mean_cost([technique.token(t) for t in tokens[: settings.dense_tokens]])
    for token in tokens[: settings.window]:
        technique.token(token)
    return mean_cost([technique.token(token) for token in tokens[settings.window :]])
