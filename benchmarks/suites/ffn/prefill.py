# SPDX-License-Identifier: Apache-2.0
"""Time to the first token with the FFN in a store on the disk, by precision (M2Cache, figure 11).

A prompt streams all neurons of every layer, in 16, 8 or 4 bit (`ffn.prefill`), while others are
multiplied. The weights are OPT's shape with random values: time follows from their bytes. Quality
is that of the model in so many bits, for the prompt alone. One engine at a time, in interleaved
rounds; the disk's files are dropped from the page cache, which reads bypass.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root
from benchmarks.harness.memory_limit import drop_cached
from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES, synthetic_model_dir
from benchmarks.inputs.synthetic_sparsity.store import synthetic_store

RESULT_KEYS = ("by_prompt", "int8_over_full", "definitions")

PRECISIONS = ("full", "int8", "int4")

DEFINITIONS = {
    "by_prompt": "seconds from a request of so many tokens to its first token, by the precision of"
    " the prompt's neurons; medians over rounds",
    "int8_over_full": "the same in 8 bit over 16, by prompt: medians of each round's ratio",
}

_MIX = (0.25, 0.25, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        shape: a name of `benchmarks.inputs.synthetic_sparsity.model.SYNTHETIC_SHAPES`.
        prompts: tokens of a prompt.
        folder: where models and stores are kept, on the disk under test ("": the cache folder).
    """

    shape: str
    prompts: tuple[int, ...] = (16, 128, 512)
    rounds: int = 3
    threads: int = 2
    folder: str = ""


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(shape="opt-1.3b", rounds=2),
    "full": Settings(shape="opt-6.7b"),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 1 + settings.rounds * len(settings.prompts) * len(PRECISIONS)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = synthetic_model_dir(settings.shape, folder)
    store = synthetic_store(model, folder, precisions=PRECISIONS, mix=_MIX)
    step(f"neuron store: {store}")
    drop_cached([folder])
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    rounds: list[dict[int, dict[str, float]]] = []
    for index in range(settings.rounds):
        rounds.append({})
        for prompt_tokens in settings.prompts:
            load = memory_capped.Load(prompt_tokens=prompt_tokens, new_tokens=2)
            found = rounds[-1][prompt_tokens] = {}
            for precision in PRECISIONS:
                ffn = {"store": str(store), "mix": list(_MIX), "far_gib": 0, "prefill": precision}
                command = memory_capped.decode_command(
                    load, model, load.kv_bytes(sizes), {"ffn": ffn}
                )
                measured = memory_capped.measure(precision, command, None, settings.threads)
                found[precision] = measured["prefill_seconds"]
                step(
                    f"round {index + 1}/{settings.rounds}, {prompt_tokens} tokens, {precision}: "
                    f"{found[precision]:.2f} s"
                )
    return summarise(rounds) | {"definitions": DEFINITIONS}


def summarise(rounds: Sequence[Mapping[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Return medians over rounds, and of each round's ratios."""
    prompts = list(rounds[0])
    return {
        "by_prompt": {
            str(prompt): {p: statistics.median(r[prompt][p] for r in rounds) for p in PRECISIONS}
            for prompt in prompts
        },
        "int8_over_full": {
            str(prompt): statistics.median(r[prompt]["int8"] / r[prompt]["full"] for r in rounds)
            for prompt in prompts
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each prompt."""
    rows = [
        [prompt, *(number(seconds[p], 2) for p in PRECISIONS)]
        for prompt, seconds in result["by_prompt"].items()
    ]
    return markdown(["tokens", *(f"{p}, s to the first token" for p in PRECISIONS)], rows)
