# SPDX-License-Identifier: Apache-2.0
"""Figures that the parts count, and the Prometheus metrics under which vLLM's server shows them.

A *figure* is one number, such as the bytes read. Several figures that differ in one respect are one
*metric* with a label, as vLLM and Prometheus name things: `kv_read_bytes` and `kv_write_bytes` are
`vllm:tiered_kv_bytes_total{direction="read"}` and `{direction="write"}`. `GET /tiered`, the report
and the plugin's own code use the figures' names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered.devices.pages import PageError

PREFIX = "vllm:tiered_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One Prometheus metric.

    Attributes:
        name: its name without `vllm:tiered_` and, for a counter, without `_total`.
        help: what it counts.
        label: the label that tells its figures apart; None if it has one figure.
        figures: figure by the label's value; the key is "" without a label.
    """

    name: str
    help: str
    label: str | None
    figures: Mapping[str, str]


def _plain(name: str, text: str) -> Metric:
    return Metric(name=name, help=text, label=None, figures={"": name})


def _labelled(name: str, text: str, label: str, **figures: str) -> Metric:
    return Metric(name=name, help=text, label=label, figures=figures)


def page_errors_figure(kind: PageError) -> str:
    """Return the figure that counts far pages that were lost for this reason."""
    return f"kv_page_errors_{kind.value}"


_REASONS = {
    PageError.CHECKSUM: "checksum: their bytes differed from those that were written",
    PageError.SHORT: "short: the file ended before them",
    PageError.IO: "io: the system reported an error",
    PageError.LATE: "late: the device did not answer in time",
    PageError.UNWRITTEN: "unwritten: read, but never written, or the last write had failed",
    PageError.WRITE: "write: their write failed",
}

COUNTER_METRICS = (
    _labelled(
        "kv_bytes",
        "KV bytes copied: read from the far to the near tier, written from near to far.",
        "direction",
        read="kv_read_bytes",
        write="kv_write_bytes",
    ),
    _labelled(
        "kv_copy_seconds",
        "Seconds in which a direction was copying KV.",
        "direction",
        read="kv_read_seconds",
        write="kv_write_seconds",
    ),
    _plain("kv_stall_seconds", "Seconds in which compute waited for KV."),
    _plain(
        "kv_bookkeeping_seconds", "Seconds of planning, translation and hooks, without the stall."
    ),
    _plain("kv_step_seconds", "Seconds of the steps of which stall and bookkeeping are shares."),
    _plain("kv_steps", "Engine steps under KV swapping."),
    _plain("kv_lost_blocks", "KV blocks with a page that did not come back intact."),
    _plain("kv_recomputed_requests", "Requests recomputed because one of their blocks was lost."),
    _plain("kv_level_changes", "Changes of the number of far layers at run time."),
    Metric(
        name="kv_page_errors",
        help=f"Far pages lost. {'; '.join(_REASONS.values())}.",
        label="reason",
        figures={kind.value: page_errors_figure(kind) for kind in _REASONS},
    ),
    _plain("weights_read_bytes", "Bytes of far weights that passed through weight buffers."),
    _plain("weights_read_seconds", "Seconds in which far weights were copied."),
    _plain("weights_stall_seconds", "Seconds in which compute waited for far weights."),
    _plain("weights_steps", "Engine steps with far weights, on each rank."),
    _labelled(
        "ffn_loaded_bytes",
        "Bytes of FFN neurons loaded, by where they came from.",
        "source",
        far="ffn_far_bytes",
        storage="ffn_storage_bytes",
    ),
    _plain("ffn_wait_seconds", "Seconds in which compute waited for FFN neurons."),
    _plain("ffn_hits", "FFN neurons that a sparse step needed and found near."),
    _plain("ffn_misses", "FFN neurons that a sparse step needed and had to load."),
    _labelled(
        "ffn_layer_steps",
        "Layer steps: sparse with selected neurons, dense with all.",
        "kind",
        sparse="ffn_sparse_steps",
        dense="ffn_dense_steps",
    ),
    _labelled(
        "experts_loaded_bytes",
        "Bytes of experts loaded into slots, by where they came from.",
        "source",
        far="experts_far_bytes",
        storage="experts_storage_bytes",
    ),
    _plain("experts_wait_seconds", "Seconds in which compute waited for experts."),
    _plain("experts_hits", "Experts that a layer's step needed and found in a slot."),
    _plain("experts_misses", "Experts that a layer's step needed and had to load."),
    _plain("experts_layer_steps", "Steps of a layer with experts in slots."),
    _plain("experts_waves", "Waves in which those steps computed their experts."),
    _plain("experts_pairs", "Pairs of a token and an expert."),
    _plain("experts_fallback_pairs", "Pairs of those that were computed in 4 bit."),
    _plain("experts_ahead", "Experts loaded before their layer's router named any."),
    _plain("experts_ahead_used", "Experts of those that the router then named."),
    _labelled(
        "l2_bytes",
        "Bytes to prefetch into the last-level cache behind all-reduces: prefetched, or dropped as "
        "their all-reduce was over.",
        "outcome",
        prefetched="l2_prefetched_bytes",
        dropped="l2_dropped_bytes",
    ),
    _plain(
        "energy_joules",
        "Joules drawn while steps ran: processor and memory of the host by RAPL, GPUs by NVML, "
        "where these can be read; else memory by constants, and the disk always.",
    ),
    _plain(
        "energy_assumed_joules", "Joules of tiered_energy_joules that are assumed, by constants."
    ),
    _plain(
        "co2e_grams",
        "Operational emissions of tiered_energy_joules, gCO2e, at report.carbon_intensity.",
    ),
    _plain(
        "embodied_co2e_grams",
        "Emissions of making the machine that fall on the time of steps, gCO2e, by "
        "report.embodied_kg and report.lifetime_years.",
    ),
)
"""Counters of the workers, summed over ranks; recomputed requests and level changes count once."""

GAUGE_METRICS = (
    _plain("kv_expansion", "Full KV blocks that fit over those that the near memory holds alone."),
    _plain("kv_far_layers", "Layers whose KV lives in the far tier."),
    _plain(
        "kv_partial_blocks_far",
        "1 if their partial blocks live there too, 0 if those stay near.",
    ),
    _labelled(
        "kv_memory_bytes",
        "KV memory of all ranks by tier: the near page pool, far memory, pages in files.",
        "tier",
        near="kv_near_bytes",
        far="kv_far_bytes",
        storage="kv_storage_bytes",
    ),
    _plain("kv_storage_failed", "1 if the storage tier failed and is not used any more."),
    _labelled(
        "kv_blocks",
        "KV blocks: released to requests, or reserved because more far layers would free them or "
        "partial blocks that stay near take their memory. Stored ones have left the prefix cache, "
        "and their content is in far memory for later requests. Kept ones are full, and near in "
        "every layer.",
        "state",
        released="kv_blocks_released",
        reserved="kv_blocks_reserved",
        stored="kv_blocks_stored",
        kept="kv_blocks_kept",
    ),
)
"""Gauges that the scheduler sets, except for the bytes of far pages."""

STEP_HISTOGRAMS = {
    "kv_step_stall_seconds": ("kv_stall_seconds", "kv_steps"),
    "weights_step_stall_seconds": ("weights_stall_seconds", "weights_stall_seconds"),
    "ffn_step_wait_seconds": ("ffn_wait_seconds", "ffn_wait_seconds"),
}
"""Histogram of a figure per engine step and rank; the second figure is there if the part ran."""

PART_ACTIVE = "part_active"
"""Gauge of which parts are at work, labelled by part and reason."""

PART_REASONS = {
    "on": "at work",
    "storage_failed": "KV only: at work, but its storage tier failed and is not used any more",
    "off": "not switched on",
    "starting": "switched on, and not set up yet",
    "nothing_to_swap": "KV only: stepped aside, since no layer can ever be far",
    "unsupported": "KV only: stepped aside, since the model or an option of vLLM rules it out",
    "all_near": "weights and experts only: stepped aside, since all fit near",
    "dense_is_smaller": "FFN only: stepped aside, since the dense FFN needs less near memory",
    "nothing_to_prefetch": "L2 only: stepped aside",
    "no_gain": "L2 only: stepped aside, since steps with prefetches were not faster",
}
"""Values of the label `reason`; `GET /tiered` has the reason as text."""

STEP_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

COUNTERS = {f: metric for metric in COUNTER_METRICS for f in metric.figures.values()}
GAUGES = {f: metric for metric in GAUGE_METRICS for f in metric.figures.values()}

_BY_SERIES = {
    (metric.name, value): figure
    for metric in (*COUNTER_METRICS, *GAUGE_METRICS)
    for value, figure in metric.figures.items()
}
_LABELS = {metric.name: metric.label for metric in (*COUNTER_METRICS, *GAUGE_METRICS)}


def figure_of(sample_name: str, labels: Mapping[str, str]) -> str | None:
    """Return the figure of a Prometheus sample, such as `vllm:tiered_kv_bytes_total`, or None."""
    if not sample_name.startswith(PREFIX):
        return None
    name = sample_name.removeprefix(PREFIX).removesuffix("_total")
    label = _LABELS.get(name)
    return _BY_SERIES.get((name, labels.get(label, "") if label else ""))


def read_figures(families: Iterable[Any]) -> dict[str, float]:
    """Return the figures in Prometheus metric families, summed over engines."""
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if (figure := figure_of(sample.name, sample.labels)) is not None:
                found[figure] = found.get(figure, 0.0) + sample.value
    return found
