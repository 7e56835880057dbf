# SPDX-License-Identifier: Apache-2.0
"""Jobs for an engine process and its answers, as JSON-safe dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.inputs.workload import Request

RESET = "reset prefix cache"
"""Job that empties the prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """One engine configuration. Systems to compare differ in `tiered` alone.

    `tiered` is the plugin's configuration (`additional_config["tiered"]`), None for vLLM alone.
    `kv_cache_memory_bytes` is None where the plugin's own plan sets the size of the KV cache. If
    `resets_prefix_cache` is false, prefixes stay cached from round to round. `checks_integrity`
    checks the plugin's structures at every step (slower: not for timing). Before the
    first read from a far tier and a share `damaged_reads` of the others, one bit of a page is
    flipped. `copies_gb_per_s`
    runs a thread that copies unused host memory during each round, at most at this rate (0: none).
    `random_weights` needs no more than a config.json in the folder. `cpus` are those of the compute
    threads, as in vLLM's VLLM_CPU_OMP_THREADS_BIND ("" leaves them to vLLM). `weights_per_s` and
    `link_bytes_per_s` hold matmuls and far weights to a speed (0: not held), see
    `benchmarks.harness.throttled_engine`; with `is_timed` the sublayers are timed.
    `kv_link_bytes_per_s` holds the copies of KV pages to a speed, each direction on its own (0: not
    held). `threads` is the
    number of compute threads (0: one per core). `engine_args` are further arguments of vLLM's, and
    override what follows from the others. An adaptive expansion stays at the level that offloads
    partial blocks too and has at least `pinned_expansion` (0: it adapts). With
    `stores_in_files` vLLM's ExampleConnector keeps prefixes, in a folder that is emptied with the
    prefix cache.
    """

    label: str
    model_dir: str
    dtype: str
    block_size: int
    kv_cache_memory_bytes: int | None
    max_num_seqs: int
    max_model_len: int
    enable_prefix_caching: bool
    tiered: Mapping[str, Any] | None = None
    resets_prefix_cache: bool = True
    checks_integrity: bool = False
    damaged_reads: float = 0.0
    copies_gb_per_s: float = 0.0
    random_weights: bool = False
    cpus: str = ""
    is_timed: bool = False
    weights_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    kv_link_bytes_per_s: float = 0.0
    threads: int = 0
    engine_args: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a dict has none
    pinned_expansion: float = 0.0
    stores_in_files: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `EngineSpec(**dict)` reads back."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Probabilities that an engine gave to the tokens of one text, from the second one on.

    Attributes:
        logprobs: natural logarithms of the probabilities it gave to them.
        likeliest: the tokens to which it gave the highest.
    """

    logprobs: Sequence[float]
    likeliest: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """Arrival of one request, and its first and last tokens, in seconds."""

    arrival_s: float
    first_token_s: float
    last_token_s: float
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpansionAt:
    """The level from one engine step of a round on; seconds since the round began.

    With `partial_blocks_far` partial blocks are far too.
    """

    step: int
    seconds: float
    expansion: float
    partial_blocks_far: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """Measurements of one round of one engine, before any summarising.

    `counters` are increases over the round and `gauges` values at its end, by metric name.
    `num_blocks` is the number of logical KV blocks that vLLM could use; `used_blocks` those in use
    in each step (for vLLM alone; the plugin's reserved blocks count as used). `peak_in_flight` is
    the most requests between their first and last token at once. `token_gaps_s` are the times
    between consecutive steps that gave a request tokens. `foreign_cpu_share` is the share of all
    cores' time that other processes took meanwhile. `requests` leaves out aborted ones, whose ids
    are `aborted_ids`; `output_token_ids` has all. `expansions` is the level at the first step and
    after each change (empty without the plugin). `integrity_checks` and `damaged_pages` count since
    the engine started; `num_descriptors` are its open file descriptors at the end of the round.
    """

    label: str
    tiered: bool
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_blocks: int
    used_blocks: Sequence[int]
    peak_in_flight: int
    rss_bytes: int
    foreign_cpu_share: float
    requests: Sequence[RequestTimes]
    token_gaps_s: Sequence[float]
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    output_token_ids: Sequence[Sequence[int]]
    aborted_ids: Sequence[str] = field(default_factory=list)
    expansions: Sequence[ExpansionAt] = field(default_factory=list)
    integrity_checks: int = 0
    damaged_pages: int = 0
    num_descriptors: int = 0

    @property
    def peak_blocks(self) -> int:
        """Most KV blocks in use in a step."""
        return max(self.used_blocks, default=0)

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `RoundResult.from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoundResult:
        """Return the result that `to_json` wrote."""
        requests = [RequestTimes(**times) for times in data["requests"]]
        expansions = [ExpansionAt(**level) for level in data["expansions"]]
        return cls(**{**data, "requests": requests, "expansions": expansions})


def request_to_json(request: Request) -> dict[str, Any]:
    """Return a dict that `request_from_json` reads back."""
    return asdict(request)


def request_from_json(data: Mapping[str, Any]) -> Request:
    """Return the request that `request_to_json` wrote; token ids become a tuple again."""
    return Request(**{**data, "prompt_token_ids": tuple(data["prompt_token_ids"])})
