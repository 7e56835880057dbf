# SPDX-License-Identifier: Apache-2.0
"""Runs a workload on one in-process vLLM engine and times every token.

Used only inside an engine process (`benchmarks.harness.worker`); vLLM is imported on use.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import damage, integrity
from benchmarks.harness.background_copier import Copier
from benchmarks.harness.jobs import EngineSpec, ExpansionAt, RequestTimes, RoundResult, Score
from benchmarks.harness.summary import COPIED_BYTES
from benchmarks.inputs.workload import Request
from vllm_tiered.adapter.telemetry import figures

_USAGE_GAUGE = "vllm:kv_cache_usage_perc"
_RELEASED_GAUGE = "vllm:tiered_kv_blocks_released"
_EXPANSION_GAUGE = "vllm:tiered_kv_expansion"
_PARTIAL_BLOCKS_GAUGE = "vllm:tiered_kv_partial_blocks_far"
_FOLDER_KEY = "shared_storage_path"
_EXTRA_METRICS = (
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_hits",
)


def start_engine(spec: EngineSpec) -> Any:
    """Return a `vllm.LLM` for the specification (takes 12 s on 2 cores)."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": spec.model_dir,
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "kv_cache_memory_bytes": spec.kv_cache_memory_bytes,
        "max_num_seqs": spec.max_num_seqs,
        "max_model_len": spec.max_model_len,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "enforce_eager": True,
        "disable_log_stats": False,  # metrics need it
        "seed": 0,
        "additional_config": {} if spec.tiered is None else {"tiered": dict(spec.tiered)},
    }
    if spec.random_weights:
        arguments |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if spec.stores_in_files:
        arguments["kv_transfer_config"] = _file_store()
    return LLM(**arguments | dict(spec.engine_args))


def _file_store() -> Any:
    """Return the configuration of vLLM's ExampleConnector with a new folder."""
    from vllm.config import KVTransferConfig

    folder = tempfile.TemporaryDirectory(prefix="kv_files_")
    atexit.register(folder.cleanup)
    return KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={_FOLDER_KEY: folder.name},
    )


def read_metrics() -> tuple[dict[str, float], dict[str, float]]:
    """Return (counters, gauges) of this process: the plugin's figures, and preemptions.

    They come from the Prometheus registry, because `LLM.get_metrics()` truncates counters to whole
    numbers, which loses counters of seconds.
    """
    from prometheus_client import REGISTRY

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    families = list(REGISTRY.collect())
    for figure, value in figures.read_figures(families).items():
        values = counters if figure in figures.COUNTERS else gauges
        values[f"{figures.PREFIX}{figure}"] = value
    for metric in families:
        if metric.name in _EXTRA_METRICS:
            samples = [s.value for s in metric.samples if s.name == f"{metric.name}_total"]
            counters[metric.name] = sum(samples)
    return counters, gauges


def run_round(llm: Any, spec: EngineSpec, requests: Sequence[Request]) -> RoundResult:
    """Run all requests to their end, each from its arrival time on, greedily and ignoring EOS.

    A request with `abort_after_tokens` is aborted once it has given that many.

    Raises RuntimeError if the prefix cache cannot be reset, or if a request ends with another
    number of tokens than it asked for (the systems would not have done equal work).
    """
    if spec.enable_prefix_caching and spec.resets_prefix_cache:
        reset_prefix_cache(llm)
    gc.collect()
    counters_before, _ = read_metrics()
    num_blocks = int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    clock = _Clock(requests, spec.block_size, num_blocks)
    copier = _copier(spec)
    cpu_before = _cpu_seconds()
    with copier or nullcontext():
        seconds = clock.drive(llm.llm_engine)
    cpu_after = _cpu_seconds()
    counters, gauges = read_metrics()
    if copier:
        counters[COPIED_BYTES] = copier.num_bytes
    clock.check_lengths()
    return RoundResult(
        label=spec.label,
        tiered=spec.tiered is not None,
        seconds=seconds,
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        num_output_tokens=sum(len(track.token_ids) for track in clock.tracks.values()),
        num_steps=clock.num_steps,
        # vLLM alone has no such gauge, and a plugin that stays inactive leaves it at 0.
        num_blocks=int(gauges.get(_RELEASED_GAUGE, 0)) or num_blocks,
        used_blocks=clock.used_blocks,
        peak_in_flight=clock.peak_in_flight,
        rss_bytes=psutil.Process().memory_info().rss,
        foreign_cpu_share=foreign_cpu_share(
            cpu_after[0] - cpu_before[0],
            cpu_after[1] - cpu_before[1],
            seconds * (os.cpu_count() or 1),
        ),
        requests=[track.times() for track in clock.tracks.values() if not track.is_aborted],
        token_gaps_s=[gap for track in clock.tracks.values() for gap in track.gaps_s],
        counters={name: value - counters_before.get(name, 0) for name, value in counters.items()},
        gauges=gauges,
        output_token_ids=[track.token_ids for track in clock.tracks.values()],
        aborted_ids=[name for name, track in clock.tracks.items() if track.is_aborted],
        expansions=clock.expansions,
        integrity_checks=integrity.num_checks(),
        damaged_pages=damage.num_damaged(),
        num_descriptors=psutil.Process().num_fds(),
    )


def score(llm: Any, text: Sequence[int]) -> Score:
    """Return the probabilities that the engine gives to the tokens of a text."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    request = {"prompt_token_ids": list(text)}
    (output,) = llm.generate([request], sampling, use_tqdm=False)
    entries = output.prompt_logprobs[1:]  # the first token has none
    return Score(
        logprobs=[entry[token].logprob for entry, token in zip(entries, text[1:], strict=True)],
        likeliest=[
            next(token for token, one in entry.items() if one.rank == 1) for entry in entries
        ],
    )


def reset_prefix_cache(llm: Any) -> None:
    """Empty the prefix cache, and the folder of a store in files.

    Raises RuntimeError if blocks are in use.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be reset: blocks are still in use")
    transfer = llm.llm_engine.vllm_config.kv_transfer_config
    folder = transfer and transfer.kv_connector_extra_config.get(_FOLDER_KEY)
    if folder:
        for kept in Path(folder).iterdir():
            shutil.rmtree(kept)


def _copier(spec: EngineSpec) -> Copier | None:
    """Return the copier that runs during a round, on all cores like the engine's copy threads."""
    if not spec.copies_gb_per_s:
        return None
    return Copier(spec.copies_gb_per_s, range(os.cpu_count() or 1))


def foreign_cpu_share(machine_s: float, own_s: float, available_s: float) -> float:
    """Return the share of the available CPU time that other processes took, 0 to 1."""
    return min(1.0, max(0.0, (machine_s - own_s) / available_s))


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds used so far by the whole machine and by this process."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # iowait counts as idle; guest time is part of user time.
    return machine.user + machine.nice + machine.system, own.user + own.system


@dataclass(kw_only=True, slots=True)
class _Track:
    """The tokens and times of one request so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    is_aborted: bool = False

    @property
    def is_due_to_abort(self) -> bool:
        limit = self.request.abort_after_tokens
        return limit is not None and len(self.token_ids) >= limit

    def add(self, token_ids: Sequence[int], now_s: float) -> None:
        if not token_ids:
            return
        if self.token_ids:
            self.gaps_s.append(now_s - self.last_token_s)
        else:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.token_ids.extend(token_ids)

    def times(self) -> RequestTimes:
        return RequestTimes(
            arrival_s=self.request.arrival_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            num_output_tokens=len(self.token_ids),
        )


class _Clock:
    """Serving loop: adds requests when they are due, steps the engine, records the times."""

    def __init__(self, requests: Sequence[Request], block_size: int, num_blocks: int) -> None:
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        self.tracks = {request.request_id: _Track(request=request) for request in ordered}
        self.num_steps = 0
        self.used_blocks: list[int] = []
        self.peak_in_flight = 0
        self.expansions: list[ExpansionAt] = []
        self._block_size = block_size
        # The null block is never used for tokens, and vLLM leaves it out of the usage share.
        self._usable_blocks = num_blocks - 1
        self._waiting = [track.request for track in reversed(self.tracks.values())]
        self._in_flight: set[str] = set()
        self._abortable: set[str] = set()

    def drive(self, engine: Any) -> float:
        """Run the loop; return the seconds from the first arrival to the last token."""
        from prometheus_client import REGISTRY

        gauges = REGISTRY.restricted_registry(
            [_USAGE_GAUGE, _EXPANSION_GAUGE, _PARTIAL_BLOCKS_GAUGE]
        )
        start = time.perf_counter()
        while self._waiting or engine.has_unfinished_requests():
            self._add_due(engine, time.perf_counter() - start)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, self._waiting[-1].arrival_s - (time.perf_counter() - start)))
                continue
            outputs = engine.step()
            now_s = time.perf_counter() - start
            self._note_gauges(gauges, self._note(outputs, now_s), now_s)
            self._abort_due(engine)
        return time.perf_counter() - start

    def _add_due(self, engine: Any, now_s: float) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._waiting and self._waiting[-1].arrival_s <= now_s:
            request = self._waiting.pop()
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            engine.add_request(request.request_id, prompt, params)
            if request.abort_after_tokens is not None:
                self._abortable.add(request.request_id)

    def _abort_due(self, engine: Any) -> None:
        due = sorted(name for name in self._abortable if self.tracks[name].is_due_to_abort)
        if due:
            engine.abort_request(due)
            for name in due:
                self.tracks[name].is_aborted = True
            self._abortable.difference_update(due)
            self._in_flight.difference_update(due)

    def _note(self, outputs: Sequence[Any], now_s: float) -> int:
        """Record one step's outputs; return the KV blocks held by requests that finished in it."""
        self.num_steps += 1
        freed_blocks = 0
        for output in outputs:
            track = self.tracks[output.request_id]
            track.add(output.outputs[0].token_ids, now_s)
            self._in_flight.add(output.request_id)
            self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
            if output.finished:
                # The last token is never fed back, so it has no KV.
                freed_blocks += math.ceil((track.request.num_tokens - 1) / self._block_size)
        finished = {output.request_id for output in outputs if output.finished}
        self._in_flight -= finished
        self._abortable -= finished
        return freed_blocks

    def _note_gauges(self, gauges: Any, freed_blocks: int, now_s: float) -> None:
        """Record the used blocks, and the level if it has changed."""
        values: dict[str, float] = {}
        for metric in gauges.collect():
            values[metric.name] = max((s.value for s in metric.samples), default=0.0)
        # The gauge is read after finished requests freed their blocks, so add those.
        used_blocks = round(values.get(_USAGE_GAUGE, 0.0) * self._usable_blocks)
        self.used_blocks.append(used_blocks + freed_blocks)
        expansion = values.get(_EXPANSION_GAUGE)
        if not expansion:
            return
        partial_blocks_far = values.get(_PARTIAL_BLOCKS_GAUGE, 0.0) > 0
        last = self.expansions[-1] if self.expansions else None
        if last is None or (last.expansion, last.partial_blocks_far) != (
            expansion,
            partial_blocks_far,
        ):
            self.expansions.append(
                ExpansionAt(
                    step=self.num_steps,
                    seconds=now_s,
                    expansion=expansion,
                    partial_blocks_far=partial_blocks_far,
                )
            )

    def check_lengths(self) -> None:
        """Raise RuntimeError unless every request gave as many tokens as it asked for.

        Aborted requests may give fewer.
        """
        for name, track in self.tracks.items():
            if track.is_aborted:
                continue
            if len(track.token_ids) != track.request.num_output_tokens:
                raise RuntimeError(
                    f"request {name} gave {len(track.token_ids)} tokens,"
                    f" asked for {track.request.num_output_tokens}"
                )
