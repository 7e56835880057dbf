# SPDX-License-Identifier: Apache-2.0
"""Far weights on a GPU against vLLM's own offloaders, with the same near bytes.

The model is OPT-13B's shape with random weights. `--cpu-offload-gb` reads far weights over the link
when needed (UVA), `--offload-backend prefetch` copies whole layers ahead, and the plugin places
parameters for latency. All have the same near memory for layers, including staging. The prefetcher
gets the settings that use most of it without exceeding it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import EngineProcess, engines, interleave
from benchmarks.harness.summary import median_ratio
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.shapes import PLANNED_SHAPES, planned_model_dir
from benchmarks.inputs.workload import Request, warmup_requests
from benchmarks.suites.gpu import load
from vllm_tiered.planner.model_shape import ModelShape

RESULT_KEYS = ("device", "by_share", "target", "workload", "definitions")

TARGET_RATIO = 1.3
NEAR, UVA, PREFETCH, OURS = "all near", "vLLM, UVA", "vLLM, prefetch", "plugin"

DEFINITIONS = {
    "ratio": "tokens/s of the plugin over those of vLLM's better offloader, same near bytes:"
    " median over rounds",
    "by_share": "keys are the layers' near bytes over all of the layers' bytes",
    "of_all_near": "tokens/s over those of vLLM with all weights near",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. `contenders` are any of "uva", "prefetch", "plugin"."""

    shape: str = "opt-13b"
    near_shares: tuple[float, ...] = (0.5,)
    contenders: tuple[str, ...] = ("uva", "prefetch", "plugin")
    num_requests: int = 4
    prompt_tokens: int = 128
    output_tokens: int = 24
    rounds: int = 2
    device: str = "cuda"
    eager: bool = True
    seed: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(),
    "full": Settings(near_shares=(0.25, 0.5, 0.75), output_tokens=48, rounds=5),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Prefetch setting: of `size` layers the last `num_offloaded` are far, `ahead` prefetched."""

    size: int
    num_offloaded: int
    ahead: int

    def near_bytes(self, num_layers: int, layer_bytes: int) -> int:
        """Return the bytes of the near layers and the prefetcher's buffers."""
        far = sum(
            1 for index in range(num_layers) if index % self.size >= self.size - self.num_offloaded
        )
        return (num_layers - far + min(self.ahead, far)) * layer_bytes


def best_groups(shape: ModelShape, near_bytes: int) -> Groups:
    """Return the groups that use most of the near bytes without exceeding them, one layer ahead.

    Raises ValueError if not even one layer at a time fits.
    """
    layer_bytes = shape.layer_bytes // shape.num_layers
    fitting = [
        groups
        for size in range(1, shape.num_layers + 1)
        for offloaded in range(1, size + 1)
        if (groups := Groups(size=size, num_offloaded=offloaded, ahead=1)).near_bytes(
            shape.num_layers, layer_bytes
        )
        <= near_bytes
    ]
    if not fitting:
        raise ValueError(f"{near_bytes} near bytes do not hold a layer of {layer_bytes}")
    # Ties go to the smallest group, which spreads far layers most evenly.
    return max(fitting, key=lambda g: (g.near_bytes(shape.num_layers, layer_bytes), -g.size))


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports."""
    systems = len(settings.contenders)
    return 1 + settings.rounds + len(settings.near_shares) * systems * (1 + settings.rounds)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    device = load.describe_device("gpu_weights", settings.device)
    shape = load.shape_of(settings.shape)
    given = _requests(settings)
    specs = _Specs(settings, shape, int(device.get("memory_bytes", 0)), len(given))
    with engines([specs.all_near()], warmup_requests(given), step) as group:
        whole = interleave(group, given, settings.rounds, step)[NEAR]
    by_share = {}
    for share in settings.near_shares:
        near_bytes = int(share * shape.layer_bytes)
        measured = _measure(specs.far(near_bytes), given, settings.rounds, step)
        by_share[f"{share:g}"] = {
            "near_bytes": near_bytes,
            **summarise_share(measured, whole),
            "engines": load.differ_in(specs.far(near_bytes)),
        }
    return {
        "device": device,
        "all_near": load.speed(whole),
        "by_share": by_share,
        "target": target_met(by_share),
        "workload": load.workload_stamp(settings.shape, given),
        "definitions": DEFINITIONS,
    }


def _measure(
    specs: Sequence[EngineSpec], given: Sequence[Request], num_rounds: int, step: Step
) -> dict[str, list[RoundResult]]:
    group: list[EngineProcess]
    with engines(specs, warmup_requests(given), step) as group:
        return interleave(group, given, num_rounds, step)


def _requests(settings: Settings) -> list[Request]:
    """Return requests of one length, so that each decode step includes all of them."""
    vocab_size = int(PLANNED_SHAPES[settings.shape]["vocab_size"])
    drawn = load.requests(settings.num_requests, 1, 1, vocab_size, settings.seed)
    return [
        Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids * settings.prompt_tokens,
            num_output_tokens=settings.output_tokens,
        )
        for request in drawn
    ]


class _Specs:
    """Engines to compare; they differ in where weights are, and in what moves them."""

    def __init__(
        self, settings: Settings, shape: ModelShape, device_bytes: int, num_requests: int
    ) -> None:
        self._settings, self._shape, self._device_bytes = settings, shape, device_bytes
        block = load.BLOCK_TOKENS[settings.device]
        tokens = settings.prompt_tokens + settings.output_tokens
        blocks = -(-tokens // block)
        self._max_model_len = blocks * block
        self._kv_bytes = (blocks * num_requests + 1) * block * shape.kv_bytes_per_token
        self._num_requests = num_requests

    def all_near(self) -> EngineSpec:
        return self._spec(NEAR, self._shape.layer_bytes)

    def far(self, near_bytes: int) -> list[EngineSpec]:
        """Return each contender's engine, with `near_bytes` for the layers."""
        far_gib = (self._shape.layer_bytes - near_bytes) / 2**30
        made = {
            "uva": lambda: self._spec(UVA, near_bytes, cpu_offload_gb=far_gib),
            "prefetch": lambda: self._prefetch(near_bytes),
            "plugin": lambda: self._spec(
                OURS,
                near_bytes,
                tiered={
                    "kv": {"enabled": False},
                    "weights": {"placement": "latency", "near_gib": near_bytes / 2**30},
                },
            ),
        }
        return [made[name]() for name in self._settings.contenders]

    def _prefetch(self, near_bytes: int) -> EngineSpec:
        groups = best_groups(self._shape, near_bytes)
        return self._spec(
            PREFETCH,
            near_bytes,
            offload_backend="prefetch",
            offload_group_size=groups.size,
            offload_num_in_group=groups.num_offloaded,
            offload_prefetch_step=groups.ahead,
        )

    def _spec(
        self, label: str, near_bytes: int, tiered: Mapping[str, Any] | None = None, **own: Any
    ) -> EngineSpec:
        settings = self._settings
        taken = near_bytes + self._shape.other_bytes + self._kv_bytes
        common = load.engine_args(settings.device, taken, self._device_bytes, eager=settings.eager)
        return EngineSpec(
            label=label,
            model_dir=str(planned_model_dir(settings.shape)),
            dtype="bfloat16",
            block_size=load.BLOCK_TOKENS[settings.device],
            kv_cache_memory_bytes=self._kv_bytes,
            max_num_seqs=self._num_requests,
            max_model_len=self._max_model_len,
            enable_prefix_caching=False,
            tiered=tiered,
            random_weights=True,
            engine_args={**common, **own},
        )


def summarise_share(
    measured: Mapping[str, Sequence[RoundResult]], whole: Sequence[RoundResult]
) -> dict[str, Any]:
    """Return the contenders' figures, and the plugin's ratio to the better of vLLM's."""
    near = load.speed(whole)
    systems = {label: load.speed(rounds) for label, rounds in measured.items()}
    for summary in systems.values():
        summary["of_all_near"] = summary["tokens_per_s"] / near["tokens_per_s"]
    theirs = [label for label in (UVA, PREFETCH) if label in systems]
    ratio = None
    if theirs and OURS in systems:
        best = max(theirs, key=lambda label: float(systems[label]["tokens_per_s"]))
        ratio = median_ratio(
            systems[OURS]["rounds_tokens_per_s"], systems[best]["rounds_tokens_per_s"]
        )
    return {"systems": systems, "ratio": ratio}


def target_met(by_share: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the target and the worst measured ratio."""
    found = min((e["ratio"] for e in by_share.values() if e["ratio"] is not None), default=None)
    is_met = None if found is None else found >= TARGET_RATIO
    return {"target": TARGET_RATIO, "found": found, "is_met": is_met}


def table(result: Mapping[str, Any]) -> str:
    """Return a row per share and system."""
    rows = [["1", NEAR, number(result["all_near"]["tokens_per_s"], 1), "1.00"]]
    for share, entry in result["by_share"].items():
        rows += [
            [share, label, number(found["tokens_per_s"], 1), number(found["of_all_near"], 2)]
            for label, found in entry["systems"].items()
        ]
    return markdown(["layers near", "system", "tokens/s", "of all near"], rows)
