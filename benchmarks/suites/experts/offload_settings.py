# SPDX-License-Identifier: Apache-2.0
"""Settings of `experts_offload`, and the command line of a contender that is vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.inputs.routing_trace import PUBLISHED
from benchmarks.peers.shapes import MIXTURES


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        long_prompt_tokens: tokens of the prompt that is timed by itself.
        shape: a name of `benchmarks.peers.model.MIXTURES`.
        batches: numbers of requests that decode together.
        memory_share: share of the weights that memory holds beside what vLLM takes.
        limit_gb: the limit itself, instead; 0 for `memory_share`.
        control_rounds: rounds of the control with a slot for each expert.
        lookahead_rounds: rounds of reading ahead, off and on.
        curves: published hit curves that one request's routing gets.
        in_memory: measure vLLM with all weights in memory, too, without a limit.
        peers_python: the interpreter that has llama.cpp beside it ("": this one).
        folder: where models and stores are kept, on the disk under test ("": the cache folder).
    """

    shape: str
    new_tokens: int
    rounds: int
    batches: tuple[int, ...] = (1, 8)
    memory_share: float = 0.5
    limit_gb: float = 0.0
    prompt_tokens: int = 12
    long_prompt_tokens: int = 512
    threads: int = 2
    policy: str = "lfu"
    control_rounds: int = 5
    lookahead_rounds: int = 3
    curves: tuple[str, ...] = tuple(PUBLISHED)
    in_memory: bool = True
    peers_python: str = ""
    folder: str = ""

    def load(self, batch: int) -> memory_capped.Load:
        """Return what is decoded."""
        return memory_capped.Load(
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            batch=batch,
            threads=self.threads,
        )


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        shape="olmoe-0.9b",
        new_tokens=24,
        rounds=1,
        batches=(1,),
        control_rounds=1,
        lookahead_rounds=0,
        curves=("imp #2061",),
    ),
    "full": Settings(shape="olmoe-7b", new_tokens=32, rounds=3),
}


def vllm_command(
    settings: Settings, model: Path, batch: int, experts: Mapping[str, Any] | None
) -> list[str]:
    """Return the command line of vLLM, with a section `experts` or without the plugin."""
    load = settings.load(batch)
    kv_bytes = load.kv_bytes(MIXTURES[settings.shape])
    tiered = None if experts is None else {"experts": dict(experts)}
    # The text of random weights soon repeats itself; at this temperature their logits are alike.
    at_random = ("--temperature", "2.0")
    return memory_capped.decode_command(load, model, kv_bytes, tiered, *at_random)


def stored(store: Path) -> dict[str, Any]:
    """Return the keys of a section `experts` that put all experts in a file."""
    return {"storage_path": str(store), "far_gib": 0}
