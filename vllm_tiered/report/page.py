# SPDX-License-Identifier: Apache-2.0
"""Report page of a timeline: `index.html`, and its pictures as PNG files next to it.

The page embeds its pictures (base64). So it can be sent as one file, and needs neither network nor
JavaScript. The PNG files are for slides and bug reports.
"""

import base64
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from vllm_tiered.energy.carbon import grams_co2e
from vllm_tiered.errors import ConfigError
from vllm_tiered.report.drawing import render
from vllm_tiered.report.figures import pictures
from vllm_tiered.report.reader import Timeline
from vllm_tiered.report.records import Header
from vllm_tiered.report.summary import Summary, summarise
from vllm_tiered.units import format_bytes

TEMPLATE = "page.html.jinja"
_MAX_LISTED_EVENTS = 200


def write_report(timeline: Timeline, folder: str | Path) -> Path:
    """Create `folder`, write the page and its pictures into it, and return the page's path.

    Raises ConfigError if the timeline has no steps, or the folder cannot be written.
    """
    if not timeline.windows:
        raise ConfigError(
            "the timeline has no steps yet: send the engine a request, wait a second, try again"
        )
    folder = Path(folder)
    drawn = [(picture, render(partial(picture.draw, timeline))) for picture in pictures(timeline)]
    page = _template().render(
        header=timeline.header,
        configured=list(configured(timeline)),
        summary=list(described(summarise(timeline.windows), timeline.header)),
        pictures=[
            {
                "name": picture.name,
                "title": picture.title,
                "caption": picture.caption,
                "png": base64.b64encode(png).decode(),
            }
            for picture, png in drawn
        ],
        events=timeline.events[-_MAX_LISTED_EVENTS:],
        num_events=len(timeline.events),
        is_closed=timeline.is_closed,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture, png in drawn:
            (folder / f"{picture.name}.png").write_bytes(png)
        index = folder / "index.html"
        index.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder}: the report cannot be written: {error.strerror}; choose another --out"
        ) from error
    return index


def configured(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Yield the configuration as rows of name and value."""
    header = timeline.header
    machine = header.machine
    yield "versions", f"vllm-tiered {header.vllm_tiered}, vLLM {header.vllm}"
    yield (
        "machine",
        f"{machine.cpu}, {machine.cores} CPUs, {format_bytes(machine.memory_bytes)}",
    )
    yield "near KV memory", format_bytes(header.near_bytes)
    yield "far KV memory", format_bytes(header.far_bytes)
    if header.storage_bytes:
        yield "KV in a file", format_bytes(header.storage_bytes)
    yield "layers with KV", f"{header.num_layers}"
    yield "block pool", f"up to {header.num_blocks} blocks of {header.block_tokens} tokens"
    yield "grid", f"{header.carbon_intensity:g} gCO2e per kWh"
    yield from _flat(header.manifest)


def described(summary: Summary, header: Header) -> Iterator[tuple[str, str, str]]:
    """Yield the summary as rows of name, value and meaning."""
    idle = max(0.0, summary.seconds - summary.step_seconds)
    yield (
        "time",
        f"{_duration(summary.seconds)}, {summary.num_steps:,} steps",
        f"idle {_duration(idle)}; longest step {1e3 * summary.longest_step_seconds:,.0f} ms",
    )
    yield (
        "throughput",
        f"{summary.median_tokens_per_second:,.0f} tokens/s",
        f"median over step time; {summary.tokens:,} output tokens in all, "
        f"{summary.tokens_per_second:,.0f} per second of step time",
    )
    yield (
        "stall",
        f"{_percent(summary.stall_share, 2)} of step time",
        f"below 1 % in {_percent(summary.transparent_share)} of step time",
    )
    yield (
        "swapped in",
        format_bytes(summary.read_bytes),
        _link(summary.read_share, summary.read_bytes_per_second),
    )
    yield (
        "swapped out",
        format_bytes(summary.write_bytes),
        _link(summary.write_share, summary.write_bytes_per_second),
    )
    yield (
        "expansion",
        f"{summary.mean_expansion:.2f} on average",
        f"at most {summary.largest_expansion:.2f}; {summary.level_changes} changes of level",
    )
    yield "preemptions", f"{summary.num_preempted:,}", "each computes a request's KV again"
    if summary.joules_per_token is not None:
        grams = grams_co2e(summary.joules_per_token, header.carbon_intensity)
        yield (
            "energy",
            f"{summary.joules_per_token:.3g} J/token",
            f"{summary.joules:,.0f} J in steps, {_known(summary.assumed_share)}",
        )
        yield (
            "emissions",
            f"{_grams(grams)}/token",
            f"operational; {_grams(grams_co2e(summary.joules, header.carbon_intensity))} in all",
        )
    if (rate := header.embodied_grams_per_second) and summary.tokens:
        grams = rate * summary.step_seconds
        yield (
            "embodied",
            f"{_grams(grams / summary.tokens)}/token",
            f"of making the machine, over its lifetime; {_grams(grams)} in all",
        )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("vllm_tiered.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten a nested table into rows with dotted keys, byte sizes and lists made readable."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif key.endswith("_bytes") and isinstance(value, int):
            yield name, format_bytes(value)
        elif isinstance(value, float):
            yield name, f"{value:g}"
        elif isinstance(value, list | tuple):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, str(value)


def _link(share: float, bytes_per_second: float) -> str:
    rate = f"{bytes_per_second / 1e9:.2f} GB/s while busy"
    return f"{rate}, busy for {_percent(share, 1)} of step time"


def _known(assumed_share: float) -> str:
    """Say how the joules are known; a share that rounds to 0 % or 100 % is put in words."""
    if not assumed_share:
        return "measured"
    if assumed_share == 1:
        return "assumed: constants"
    return f"{_percent(assumed_share, 1)} of it assumed: constants, the rest measured"


def _grams(grams: float) -> str:
    return f"{1e3 * grams:.3g} mgCO2e" if grams < 0.1 else f"{grams:.3g} gCO2e"


def _percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def _duration(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.1f} s"
    if seconds < 3 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
